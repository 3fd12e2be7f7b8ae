//! A server with a scripted model, and a client without any library's help.
#![allow(dead_code)] // each test binary uses a part

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    ops::ControlFlow,
    path::PathBuf,
    sync::{Arc, LazyLock, Mutex},
    time::Duration,
};

use engine::{Answer, Miss, Prompt, Result, Reuse, Session, Stopped, Watch};
use serde_json::Value;
use server::{Engine, SessionEngine, Settings};
use text::Tokenizer;

pub fn repository(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// The released tokenizer, which `cargo xtask tokenizer` makes.
pub fn released() -> Arc<Tokenizer> {
    static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
        let path = std::env::var_os("HALLMARK_TOKENIZER").map(PathBuf::from).unwrap_or_else(|| {
            PathBuf::from(std::env::var_os("HOME").unwrap_or_default())
                .join(".cache/hallmark/tokenizer/tokenizer.json")
        });
        Arc::new(Tokenizer::from_file(&path).expect("run `cargo xtask tokenizer`"))
    });
    Arc::clone(&TOKENIZER)
}

pub fn cases(path: &str) -> Vec<Value> {
    let bytes = std::fs::read(repository(path)).expect("a fixture file");
    let mut text = String::new();
    match path.ends_with(".gz") {
        true => flate2::read::GzDecoder::new(&bytes[..]).read_to_string(&mut text),
        false => (&bytes[..]).read_to_string(&mut text),
    }
    .expect("a fixture in UTF-8");
    text.lines().map(|line| serde_json::from_str(line).expect("a fixture line is JSON")).collect()
}

pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().expect("a list of ids").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

/// What the scripted model says, and what it was asked.
#[derive(Default)]
pub struct Script {
    pub says: Vec<u32>,
    pub cached: usize,
    /// Goes on from what the last request left, in place of `cached` tokens.
    pub remembers: bool,
    pub asked: Vec<u32>,
    /// Says the same for ever, one token in this time.
    pub endless: Option<Duration>,
    /// Tokens said so far, over all requests.
    pub said: usize,
    /// Says what stands first here and is allowed, in place of the rest.
    pub prefers: Vec<u32>,
}

/// A scripted model says what it is told to, whatever form was asked for, unless it only has preferences.
struct ScriptedEngine {
    inner: SessionEngine,
    script: Arc<Mutex<Script>>,
}

impl Engine for ScriptedEngine {
    fn answer(&mut self, prompt: &Prompt, watch: &mut dyn Watch) -> Result<Answer> {
        let mut prompt = prompt.clone();
        if self.script.lock().unwrap().prefers.is_empty() {
            prompt.guide = None;
        }
        self.inner.answer(&prompt, watch)
    }
}

struct Scripted {
    script: Arc<Mutex<Script>>,
    ids: Vec<u32>,
    prompt: usize,
    kept: usize,
    miss: Miss,
    row: Vec<f32>,
    eos: u32,
}

impl Session for Scripted {
    fn ids(&self) -> &[u32] {
        &self.ids
    }

    fn context(&self) -> usize {
        1 << 20
    }

    fn rewind(&mut self, ids: &[u32]) -> Result<usize> {
        let mut script = self.script.lock().unwrap();
        script.asked = ids.to_vec();
        let limit = ids.len() - 1;
        let own = self.ids.iter().zip(&ids[..limit]).take_while(|(a, b)| a == b).count();
        self.kept = if script.remembers { own } else { script.cached.min(limit) };
        self.miss = match self.ids.get(own) {
            Some(&kept) if script.remembers => Miss::Differs { at: own, asked: ids[own], kept },
            _ => Miss::Ends { at: self.kept },
        };
        self.prompt = ids.len();
        self.ids = ids[..self.kept].to_vec();
        Ok(self.kept)
    }

    fn reuse(&self) -> Reuse {
        Reuse {
            prompt: self.prompt,
            kept: self.kept,
            recomputed: 0,
            found: self.kept,
            miss: self.miss.clone(),
        }
    }

    fn feed(
        &mut self,
        ids: &[u32],
        _: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<std::result::Result<(), Stopped>> {
        self.ids.extend_from_slice(ids);
        let mut script = self.script.lock().unwrap();
        let next = match script.endless {
            Some(time) => {
                std::thread::sleep(time);
                script.says.first().copied()
            }
            None => script.says.get(self.ids.len() - self.prompt).copied(),
        };
        script.said += 1;
        if script.prefers.is_empty() {
            self.row.fill(f32::NEG_INFINITY);
            self.row[next.unwrap_or(self.eos) as usize] = 0.0;
        } else {
            self.row.fill(-1000.0);
            for (n, &id) in script.prefers.iter().enumerate() {
                self.row[id as usize] = -(n as f32);
            }
        }
        Ok(Ok(()))
    }

    fn logits(&self) -> &[f32] {
        &self.row
    }
}

/// A running server; it ends with the test's process.
pub struct Server {
    pub address: SocketAddr,
    pub tokenizer: Arc<Tokenizer>,
    pub script: Arc<Mutex<Script>>,
}

pub fn settings() -> Settings {
    Settings { model: "DeepSeek-V4.1-Flash".into(), ..Settings::new("", 1 << 20) }
}

pub fn scripted(settings: Settings, max_queue: usize) -> Server {
    let tokenizer = released();
    let script = Arc::new(Mutex::new(Script::default()));
    let eos = tokenizer.special_id(text::special::EOS).expect("an end token");
    let session = Scripted {
        script: script.clone(),
        ids: Vec::new(),
        prompt: 0,
        kept: 0,
        miss: Miss::Empty,
        row: vec![0.0; tokenizer.vocab_size()],
        eos,
    };
    let inner = SessionEngine { tokenizer: tokenizer.clone(), eos, session: Box::new(session) };
    let engine = ScriptedEngine { inner, script: script.clone() };
    Server { address: spawn(settings, tokenizer.clone(), engine, max_queue), tokenizer, script }
}

pub fn spawn(
    settings: Settings,
    tokenizer: Arc<Tokenizer>,
    engine: impl Engine,
    max_queue: usize,
) -> SocketAddr {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            sender.send(listener.local_addr().unwrap()).unwrap();
            let forever = std::future::pending();
            let grace = Duration::from_secs(1);
            server::serve(listener, settings, tokenizer, engine, max_queue, grace, forever).await.unwrap();
        });
    });
    receiver.recv().unwrap()
}

/// An answer as it came.
pub struct Reply {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// Name and data of every event, and whether `[DONE]` came last.
    pub fn events(&self) -> (Vec<(Option<String>, Value)>, bool) {
        let (mut events, mut done) = (Vec::new(), false);
        for block in self.body.split("\n\n").filter(|b| !b.is_empty() && !b.starts_with(':')) {
            assert!(!done, "nothing follows [DONE]: {block}");
            let name = block.lines().find_map(|l| l.strip_prefix("event: ")).map(str::to_owned);
            let data = block.lines().find_map(|l| l.strip_prefix("data: ")).expect("data");
            match data {
                "[DONE]" => done = true,
                data => events.push((name, serde_json::from_str(data).expect("JSON"))),
            }
        }
        (events, done)
    }
}

pub fn open(address: SocketAddr, method: &str, path: &str, headers: &str, body: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    // A server that refuses a body early may close before it has read it.
    let _ = stream.write_all(body);
    stream
}

pub fn request(address: SocketAddr, method: &str, path: &str, headers: &str, body: &[u8]) -> Reply {
    let mut stream = open(address, method, path, headers, body);
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    reply(&bytes)
}

/// The bytes of an answer, read.
pub fn reply(bytes: &[u8]) -> Reply {
    let at = bytes.windows(4).position(|w| w == b"\r\n\r\n").expect("a head") + 4;
    let head = String::from_utf8(bytes[..at].to_vec()).unwrap().to_lowercase();
    let mut rest = &bytes[at..];
    let mut body = Vec::new();
    if head.contains("transfer-encoding: chunked") {
        loop {
            let line = rest.windows(2).position(|w| w == b"\r\n").expect("a chunk's size");
            let size = usize::from_str_radix(std::str::from_utf8(&rest[..line]).unwrap(), 16).unwrap();
            if size == 0 {
                break;
            }
            body.extend_from_slice(&rest[line + 2..line + 2 + size]);
            rest = &rest[line + 4 + size..];
        }
    } else {
        body.extend_from_slice(rest);
    }
    let status = head[9..12].parse().unwrap();
    Reply { status, head, body: String::from_utf8(body).unwrap() }
}

pub fn post(address: SocketAddr, path: &str, body: &Value) -> Reply {
    request(address, "POST", path, "Content-Type: application/json\r\n", body.to_string().as_bytes())
}

pub fn path(api: &Value) -> &'static str {
    match api.as_str().unwrap() {
        "chat" => "/v1/chat/completions",
        "messages" => "/v1/messages",
        "responses" => "/v1/responses",
        other => panic!("unknown api {other}"),
    }
}
