//! The server as its users meet it: the page in a browser, the examples and other people's clients, with the demo model.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::process::{cache, cargo, output, root, run, target_dir};
use crate::{node, python, tools};

const BROWSER: [&str; 1] = ["playwright-core@1.65.1"];
/// The last version that runs on Node 20.
const JS_CLIENTS: [&str; 1] = ["openai@6.49.0"];
/// The clients and all that they need.
const PYTHON_CLIENTS: [&str; 17] = [
    "annotated-types==0.8.0",
    "anthropic==2.14.0",
    "anyio==4.16.0",
    "docstring_parser==0.18.0",
    "h11==0.16.0",
    "httpcore2==2.16.2",
    "httpx2==2.16.2",
    "idna==3.20",
    "jiter==0.19.0",
    "openai==3.57.0",
    "opentelemetry-api==1.45.2",
    "pydantic==2.14.4",
    "pydantic_core==2.50.5",
    "sniffio==1.3.1",
    "truststore==0.10.5",
    "typing-inspection==0.4.5",
    "typing_extensions==4.16.0",
];

/// `cargo xtask web`: builds the program and runs both parts; `shots` writes the pictures of docs/ anew.
pub fn run_all(shots: bool) -> Result<()> {
    run(&mut cargo(&["build", "--package", "cli"])?)?;
    browser(shots)?;
    clients()
}

/// The program as the part `tests` built it.
fn program() -> Result<PathBuf> {
    let program = target_dir()?.join("debug").join(format!("hallmark{}", std::env::consts::EXE_SUFFIX));
    match program.exists() {
        true => Ok(program),
        false => bail!("{} is missing: run cargo build --package cli", program.display()),
    }
}

/// The page in a real browser.
pub fn browser(shots: bool) -> Result<()> {
    let program = program()?;
    let chromium = std::env::var_os("CHROMIUM").map_or_else(|| "chromium".into(), PathBuf::from);
    if chromium == Path::new("chromium") {
        tools::debian("chromium", &["chromium"])?;
    }
    let chromium = found(&chromium)?;
    let folder = node::packages("browser", &BROWSER)?;
    let judgement = judgement(&program)?;
    let mut command = node::script(&folder, "xtask/web/page.mjs")?;
    command.env("HALLMARK", &program).env("CHROMIUM", chromium).env("JUDGEMENT", judgement);
    // One that is neither PASS nor FAIL.
    command.env("RECEIPT", root().join("receipts/wide-cpu-x86_64-exact.json"));
    if shots {
        command.env("SHOTS", root().join("docs"));
    }
    run(&mut command)
}

/// The whole path of a program.
fn found(program: &Path) -> Result<PathBuf> {
    if program.is_absolute() {
        return Ok(program.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut candidates = std::env::split_paths(&path).map(|folder| folder.join(program));
    candidates.find(|file| file.is_file()).with_context(|| format!("{} is not in PATH", program.display()))
}

/// A judgement for the page's heat map: the demo model's `source` numerics against its `exact` ones.
fn judgement(program: &Path) -> Result<PathBuf> {
    let folder = cache()?.join("judgement");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let file = |name: &str| folder.join(name);
    let trace = |out: &str, more: &[&str]| {
        let mut command = Command::new(program);
        command.args(["trace", "--threads", "1", "--out"]).arg(file(out)).args(more);
        run(&mut command)
    };
    trace("exact.safetensors", &["--numerics", "exact", "-p", "What is the capital of France?"])?;
    trace("source.safetensors", &["--numerics", "source", "-p", "What is the capital of France?"])?;
    let mut judge = Command::new(program);
    judge.args(["judge", "--json", "--reference"]).arg(file("exact.safetensors"));
    let text = output(judge.arg("--candidate").arg(file("source.safetensors")))?;
    let path = file("judgement.json");
    crate::process::write(&path, &text)?;
    Ok(path)
}

/// The examples, and the clients' tests, against one server; a second one wants a key.
pub fn clients() -> Result<()> {
    let program = program()?;
    let python = python::environment("clients", &PYTHON_CLIENTS)?;
    let folder = node::packages("clients", &JS_CLIENTS)?;
    tools::debian("curl", &["curl"])?;
    let open = Server::start(&program, &[])?;
    let keyed = Server::start(&program, &["--api-key", "right"])?;
    let set = |command: &mut Command| {
        command.env("HALLMARK_URL", &open.url).env("KEYED_URL", &keyed.url);
        command.env_remove("HALLMARK_API_KEY").env("FIXTURES", root().join("fixtures/demo_eval.jsonl"));
    };
    for test in ["openai_test", "anthropic_test"] {
        let mut command = Command::new(&python);
        command.arg(root().join(format!("xtask/web/{test}.py")));
        set(&mut command);
        run(&mut command)?;
    }
    let mut command = node::script(&folder, "xtask/web/openai_test.mjs")?;
    set(&mut command);
    run(&mut command)?;
    for (example, tells) in [
        ("curl.sh", "12 * 13 = 156"),
        ("openai_chat.py", "Your name is Sophie."),
        ("agent.py", "It is 21 degrees celsius and sunny in Lisbon."),
        ("anthropic_chat.py", "It is 21 degrees celsius and sunny in Lisbon."),
        ("openai_chat.mjs", "12 * 13 = 156"),
    ] {
        let mut command = match example.rsplit('.').next() {
            Some("py") => Command::new(&python),
            Some("mjs") => node::script(&folder, &format!("examples/{example}"))?,
            _ => Command::new("sh"),
        };
        if !example.ends_with(".mjs") {
            command.arg(root().join("examples").join(example));
        }
        set(&mut command);
        let said = String::from_utf8_lossy(&output(&mut command)?).into_owned();
        if !said.contains(tells) {
            bail!("examples/{example} does not say {tells:?}, but:\n{said}");
        }
        println!("examples/{example}: ok");
    }
    Ok(())
}

/// A running `hallmark serve`, ended when dropped.
struct Server {
    child: Child,
    url: String,
}

impl Server {
    fn start(program: &Path, more: &[&str]) -> Result<Self> {
        let mut command = Command::new(program);
        command.args(["serve", "--port", "0", "--threads", "1", "--grace", "1"]).args(more);
        command.env_remove("HALLMARK_API_KEY").stdin(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        let mut lines = BufReader::new(child.stderr.take().context("no standard error")?).lines();
        let mut said = String::new();
        let url = loop {
            let Some(line) = lines.next() else {
                bail!("hallmark serve ended ({}):\n{said}", child.wait()?);
            };
            let line = line?;
            if let Some(url) = line.strip_prefix("listening on ") {
                break url.to_owned();
            }
            said += &(line + "\n");
        };
        // What it says later must be read, or it would wait.
        std::thread::spawn(move || lines.for_each(drop));
        Ok(Self { child, url })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended
        let _ = self.child.wait();
    }
}
