"""OpenAI's Python client: pip install openai. HALLMARK_URL says where `hallmark serve` listens."""

import os

from openai import OpenAI

url = os.environ.get("HALLMARK_URL", "http://127.0.0.1:8080")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("HALLMARK_API_KEY", "none"))
messages = [{"role": "user", "content": "My name is Sophie."}]

answer = client.chat.completions.create(model="deepseek-v4.1-flash", messages=messages, temperature=0)
message = answer.choices[0].message
print("thought:", message.reasoning_content)  # not in OpenAI's API; the client passes it on
print("said:", message.content)

# Send the reasoning back with the answer: then the whole turn is in the prompt cache.
messages.append({"role": "assistant", "content": message.content, "reasoning_content": message.reasoning_content})
messages.append({"role": "user", "content": "What is my name?"})
stream = client.chat.completions.create(
    model="deepseek-v4.1-flash", messages=messages, temperature=0, stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)
    if chunk.usage:
        cached = chunk.usage.prompt_tokens_details.cached_tokens
        print(f"\n{cached} of {chunk.usage.prompt_tokens} prompt tokens were cached")
