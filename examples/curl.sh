#!/bin/sh
# Talks with `hallmark serve` by curl alone. HALLMARK_URL says where it listens, HALLMARK_API_KEY is its key, if it has one.
set -eu
url=${HALLMARK_URL:-http://127.0.0.1:8080}
ask() { # PATH JSON
    curl -sS --no-buffer --fail-with-body "$url$1" -H "Authorization: Bearer ${HALLMARK_API_KEY:-none}" \
        -H 'Content-Type: application/json' -d "$2"
    echo
}

echo "== Chat"
ask /v1/chat/completions '{"model": "deepseek-v4.1-flash", "temperature": 0,
    "messages": [{"role": "user", "content": "What is 12 * 13?"}]}'

echo "== Streamed, without reasoning"
ask /v1/chat/completions '{"model": "deepseek-v4.1-flash", "temperature": 0, "stream": true, "reasoning_effort": "none",
    "messages": [{"role": "user", "content": "What is the capital of France?"}]}'

echo "== A tool"
ask /v1/chat/completions '{"model": "deepseek-v4.1-flash", "temperature": 0,
    "messages": [{"role": "user", "content": "Give me the celsius temperature in Lisbon."}],
    "tools": [{"type": "function", "function": {"name": "get_weather", "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}}, "required": ["city", "unit"]}}}]}'

echo "== Anthropic's messages"
ask /v1/messages '{"model": "deepseek-v4.1-flash", "max_tokens": 200, "temperature": 0,
    "messages": [{"role": "user", "content": "What is a hammer?"}]}'

echo "== The queue"
curl -sS --fail-with-body "$url/metrics" | grep '^hallmark_requests_'
