// OpenAI's JavaScript client against `hallmark serve` with the demo model. HALLMARK_URL: where it listens.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const { HALLMARK_URL, KEYED_URL } = process.env;
const client = new OpenAI({ baseURL: `${HALLMARK_URL}/v1`, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const model = "deepseek-v4.1-flash";
const user = (content) => ({ role: "user", content });
const chat = (messages, fields = {}) => client.chat.completions.create({ model, messages, temperature: 0, ...fields });
const tools = [{ type: "function", function: { name: "get_weather", description: "Get the current weather in a city.",
  parameters: { type: "object", properties: { city: { type: "string" }, unit: { type: "string", enum: ["celsius", "fahrenheit"] } },
    required: ["city", "unit"] } } }];

test("chat, whole and streamed", async () => {
  const whole = await chat([user("What is 12 * 13?")]);
  assert.equal(whole.choices[0].message.content, "12 * 13 = 156");
  const pieces = [];
  let usage;
  for await (const chunk of await chat([user("What is 12 * 13?")], { stream: true, stream_options: { include_usage: true } })) {
    pieces.push(chunk.choices[0]?.delta.content ?? "");
    usage = chunk.usage ?? usage;
  }
  assert.equal(pieces.join(""), "12 * 13 = 156");
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
});

test("a tool's round trip", async () => {
  const messages = [user("Give me the celsius temperature in Lisbon.")];
  const { message, finish_reason } = (await chat(messages, { tools })).choices[0];
  assert.equal(finish_reason, "tool_calls");
  assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), { city: "Lisbon", unit: "celsius" });
  messages.push(message, { role: "tool", tool_call_id: message.tool_calls[0].id, content: '{"temperature": 21, "unit": "celsius", "sky": "sunny"}' });
  assert.equal((await chat(messages, { tools })).choices[0].message.content, "It is 21 degrees celsius and sunny in Lisbon.");
});

test("responses, streamed", async () => {
  const stream = client.responses.stream({ model, input: "What is the capital of France?", temperature: 0 });
  let text = "";
  for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
  assert.match(text, /Paris/);
  assert.equal((await stream.finalResponse()).output_text, text);
});

test("an answer of a schema", async () => {
  const schema = { type: "object", additionalProperties: false, required: ["name", "age"],
    properties: { name: { type: "string", maxLength: 20 }, age: { type: "integer", minimum: 0, maximum: 120 } } };
  const stream = await chat([user("Make a JSON object with name Anna and age 7.")],
    { stream: true, max_tokens: 400, response_format: { type: "json_schema", json_schema: { name: "person", strict: true, schema } } });
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? "";
  const value = JSON.parse(text);
  assert.deepEqual(Object.keys(value), ["name", "age"]);
  assert.ok(value.age >= 0 && value.age <= 120 && value.name.length <= 20);
});

test("log-probabilities", async () => {
  const { logprobs } = (await chat([user("Hello!")], { logprobs: true, top_logprobs: 2, reasoning_effort: "none" })).choices[0];
  assert.ok(logprobs.content.length > 1 && logprobs.content.every((token) => token.logprob <= 0 && token.top_logprobs.length === 2));
});

test("errors are the client's own", async () => {
  await assert.rejects(chat([user("hi")], { temperature: 9 }), (error) => error instanceof OpenAI.BadRequestError && /temperature/.test(error.message));
  await assert.rejects(new OpenAI({ baseURL: `${KEYED_URL}/v1`, apiKey: "wrong", maxRetries: 0 }).models.list(), OpenAI.AuthenticationError);
});

test("an aborted stream ends the answer", async () => {
  const stream = await chat([user("Count from 1 to 40.")], { stream: true, logit_bias: { 1: -100 }, max_tokens: 3900, reasoning_effort: "none" });
  let chunks = 0;
  for await (const _ of stream) if (++chunks === 5) stream.controller.abort();
  assert.ok(chunks < 1000, `${chunks} chunks came after all`);
  assert.equal((await chat([user("What is 3 + 4?")])).choices[0].message.content, "3 + 4 = 7");
});
