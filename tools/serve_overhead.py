#!/usr/bin/env python3
"""CPU time of a streamed token in `hallmark serve` beyond what the model takes, demo model, one thread.

    python3 tools/serve_overhead.py HALLMARK [ROUNDS]

Beside `bench decode`, which decodes other text, and beside `hallmark run` of the same request, which samples and parses the same
tokens. All are differences of two lengths (answers of 512 and of 64 tokens), so that loading, prefill and what a request costs
once cancel; CPU time of the whole process, user and system. Other work on the machine adds only: read the least. Prints JSON.
"""
import json, os, re, resource, statistics, subprocess, sys, tempfile, urllib.request

SHORT, LONG, RUNS = 64, 512, 3
hallmark, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 9
QUIET = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def body(tokens):
    """The end token is forbidden: every answer has its full length."""
    return {"model": "demo", "messages": [{"role": "user", "content": "Count. " * 12}], "max_tokens": tokens, "temperature": 0,
            "thinking": {"type": "disabled"}, "logit_bias": {"1": -100}}


def child(*args):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([hallmark, *args, "--threads", "1", "--drafts", "off"], **QUIET)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def bench(tokens):
    # Its first run is not reported, but runs.
    return child("bench", "decode", "--tokens", "64", "--decode", str(tokens), "--runs", str(RUNS - 1), "--json")


def run(tokens):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(body(tokens), file)
        file.flush()
        return sum(child("run", "--messages", file.name, "--json", "--context", "2048") for _ in range(RUNS))


def cpu(pid):
    """Seconds that the threads of a process have run; `stat` counts in hundredths of a second only."""
    threads = os.listdir(f"/proc/{pid}/task")
    return sum(int(open(f"/proc/{pid}/task/{t}/schedstat").read().split()[0]) for t in threads) * 1e-9


def serve(url, pid, tokens):
    data = json.dumps(body(tokens) | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    before = cpu(pid)
    for _ in range(RUNS):
        usage = None
        with urllib.request.urlopen(urllib.request.Request(url + "/v1/chat/completions", data, {"Content-Type": "application/json"})) as answer:
            for line in answer:
                if b'"usage":{' in line:
                    usage = json.loads(line[6:])["usage"]
        if usage is None or usage["completion_tokens"] != tokens:
            sys.exit(f"an answer has not {tokens} tokens: {usage}")
    return cpu(pid) - before


command = [hallmark, "serve", "--port", "0", "--threads", "1", "--context", "2048", "--drafts", "off", "--served-name", "demo"]
server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
try:
    url = next(m.group(1) for m in (re.match(r"listening on (\S+)", line) for line in server.stderr) if m)
    serve(url, server.pid, SHORT)
    ways = {"bench": bench, "run": run, "serve": lambda tokens: serve(url, server.pid, tokens)}
    taken = {name: {LONG: [], SHORT: []} for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            for tokens in (LONG, SHORT):
                taken[name][tokens].append(way(tokens))
finally:
    server.terminate()
    server.wait()


def tokens(pick):
    return {name: round((pick(t[LONG]) - pick(t[SHORT])) / (RUNS * (LONG - SHORT)) * 1e6, 1) for name, t in taken.items()}


seconds = {name: {str(n): [round(v, 3) for v in values] for n, values in t.items()} for name, t in taken.items()}
print(json.dumps({"us_a_token": {"least": tokens(min), "median": tokens(statistics.median)}, "cpu_s": seconds}))
