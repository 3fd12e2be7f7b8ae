// OpenAI's JavaScript client: npm install openai. HALLMARK_URL says where `hallmark serve` listens.

import OpenAI from "openai";

const url = process.env.HALLMARK_URL ?? "http://127.0.0.1:8080";
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: process.env.HALLMARK_API_KEY ?? "none" });
const model = "deepseek-v4.1-flash";

const stream = await client.chat.completions.create({
  model, temperature: 0, stream: true, messages: [{ role: "user", content: "What is 12 * 13?" }],
});
let thoughts = "";
for await (const chunk of stream) {
  const delta = chunk.choices[0].delta;
  thoughts += delta.reasoning_content ?? ""; // not in OpenAI's API; the client passes it on
  process.stdout.write(delta.content ?? "");
}
console.log(`\n(thought: ${thoughts})`);

const response = await client.responses.create({ model, temperature: 0, input: "What is the capital of France?" });
console.log(response.output_text);
