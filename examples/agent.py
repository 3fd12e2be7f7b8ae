"""A loop in which the model calls tools until it has an answer: pip install openai."""

import json
import os
import sys

from openai import OpenAI

url = os.environ.get("HALLMARK_URL", "http://127.0.0.1:8080")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("HALLMARK_API_KEY", "none"))


def get_weather(city, unit):
    """Get the current weather in a city."""
    return {"temperature": 21 if unit == "celsius" else 70, "unit": unit, "sky": "sunny"}


def add(a, b):
    """Add two numbers."""
    return {"sum": a + b}


TOOLS = {"get_weather": get_weather, "add": add}
UNIT = {"type": "string", "enum": ["celsius", "fahrenheit"]}
PARAMETERS = {
    "get_weather": {"city": {"type": "string"}, "unit": UNIT},
    "add": {"a": {"type": "number"}, "b": {"type": "number"}},
}
SCHEMAS = [
    {"type": "function", "function": {"name": name, "description": tool.__doc__, "parameters": {
        "type": "object", "properties": PARAMETERS[name], "required": list(PARAMETERS[name])}}}
    for name, tool in TOOLS.items()
]


def run(call):
    """The result of a call as text; an error is a result too, the model may mend it."""
    try:
        return json.dumps(TOOLS[call.function.name](**json.loads(call.function.arguments)))
    except Exception as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})


def ask(question, steps=8):
    messages = [{"role": "user", "content": question}]
    for _ in range(steps):
        answer = client.chat.completions.create(
            model="deepseek-v4.1-flash", messages=messages, tools=SCHEMAS, temperature=0)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = run(call)
            print(f"{call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return "no answer within the allowed steps"


for question in sys.argv[1:] or ["Give me the celsius temperature in Lisbon."]:
    print(ask(question))
