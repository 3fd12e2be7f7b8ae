"""Anthropic's Python client: pip install anthropic. HALLMARK_URL says where `hallmark serve` listens."""

import os

from anthropic import Anthropic

url = os.environ.get("HALLMARK_URL", "http://127.0.0.1:8080")
client = Anthropic(base_url=url, api_key=os.environ.get("HALLMARK_API_KEY", "none"))
model = "deepseek-v4.1-flash"

with client.messages.stream(
    model=model, max_tokens=200, messages=[{"role": "user", "content": "What is the capital of France?"}],
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()

tools = [{
    "name": "get_weather", "description": "Get the current weather in a city.",
    "input_schema": {"type": "object", "required": ["city", "unit"], "properties": {
        "city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}}},
}]
messages = [{"role": "user", "content": "Give me the celsius temperature in Lisbon."}]
answer = client.messages.create(model=model, max_tokens=400, messages=messages, tools=tools)
messages.append({"role": "assistant", "content": answer.content})
results = []
for block in answer.content:
    if block.type == "tool_use":
        print(f"{block.name}({block.input})")
        result = '{"temperature": 21, "unit": "celsius", "sky": "sunny"}'
        results.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
messages.append({"role": "user", "content": results})
answer = client.messages.create(model=model, max_tokens=400, messages=messages, tools=tools)
print("".join(block.text for block in answer.content if block.type == "text"))
