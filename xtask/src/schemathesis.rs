//! Schemathesis on the server's own description: whatever a request holds, no answer is a server error.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

use crate::process::{cargo, run, target_dir};
use crate::python;

/// schemathesis with all that it needs.
const REQUIREMENTS: [&str; 27] = [
    "anyio==4.16.0",
    "certifi==2026.10.19.post1",
    "charset-normalizer==3.5.3",
    "click==8.5.1",
    "graphql-core==3.3.2",
    "harfile==0.6.0",
    "hypothesis==6.170.17",
    "hypothesis-graphql==0.13.5",
    "idna==3.20",
    "iniconfig==2.3.1",
    "jsonschema_rs==0.60.3",
    "markdown-it-py==4.3.0",
    "MarkupSafe==3.0.4",
    "mdurl==0.1.2",
    "packaging==26.4",
    "pluggy==1.7.0",
    "Pygments==2.21.0",
    "pyrate-limiter==4.5.1",
    "pytest==9.2.0",
    "PyYAML==6.0.4",
    "requests==2.34.2",
    "rich==15.0.0",
    "schemathesis==4.32.5",
    "sortedcontainers==2.4.0",
    "typing_extensions==4.16.0",
    "urllib3==2.8.0",
    "Werkzeug==3.1.9",
];

/// Requests to each path in the fuzzing phase.
const EXAMPLES: &str = "150";

/// A child that ends with this process's interest in it.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Serves the demo model with a short context and sends what its description at `/openapi.json` allows and what not.
pub fn check() -> Result<()> {
    let python = python::environment("schemathesis", &REQUIREMENTS)?;
    run(&mut cargo(&["build", "--package", "cli"])?)?;
    let program = target_dir()?.join("debug/hallmark");
    let mut command = Command::new(&program);
    command.args(["serve", "--port", "0", "--threads", "1", "--context", "256"]).stderr(Stdio::piped());
    let mut server = Server(command.spawn().with_context(|| format!("cannot start {}", program.display()))?);
    let errors = server.0.stderr.take().context("the server has no standard error")?;
    let mut lines = BufReader::new(errors).lines();
    let address = lines
        .by_ref()
        .map_while(Result::ok)
        .find_map(|line| line.strip_prefix("listening on ").map(str::to_owned))
        .context("the server did not listen")?;
    std::thread::spawn(move || lines.for_each(drop));
    let mut tests = Command::new(python);
    tests.args(["-m", "schemathesis.cli", "run", &format!("{address}/openapi.json")]);
    tests.args(["--checks", "not_a_server_error", "--phases", "examples,coverage,fuzzing"]);
    tests.args(["--max-examples", EXAMPLES, "--workers", "4", "--seed", "1", "--request-timeout", "120"]);
    tests.args(["--suppress-health-check", "all", "--generation-database", "none"]);
    run(&mut tests)
}
