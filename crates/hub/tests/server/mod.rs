//! A repository server that can be made to misbehave.
#![allow(dead_code)] // each test binary uses its part

use std::{
    collections::HashMap,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
    time::Duration,
};

use sha1::Sha1;
use sha2::{Digest, Sha256};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub const REPOSITORY: &str = "owner/name";

/// What a client asks for.
#[derive(Clone, Debug)]
pub struct Request {
    pub path: String,
    /// First byte and the one after the last.
    pub range: Option<(u64, u64)>,
    pub token: Option<String>,
    /// Requests for this path before.
    pub before: usize,
    /// Requests for anything before.
    pub number: usize,
}

impl Request {
    pub fn is_file(&self, name: &str) -> bool {
        self.path == format!("/{REPOSITORY}/resolve/{COMMIT}/{name}")
    }

    pub fn is_list(&self) -> bool {
        self.path.starts_with("/api/")
    }
}

/// What it gets.
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// The length that the headers claim; none leaves it out.
    pub length: Option<u64>,
    /// Body bytes before the connection is closed.
    pub cut: Option<usize>,
    /// Silence after the cut, before the connection is closed.
    pub silence: Duration,
    /// Sent instead of everything.
    pub raw: Option<Vec<u8>>,
}

impl Answer {
    pub fn status(&mut self, status: u16, headers: &[(&str, &str)]) {
        self.status = status;
        self.headers = headers.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        self.body.clear();
        self.length = Some(0);
    }

    /// The whole file instead of the range.
    pub fn whole(&mut self, bytes: &[u8]) {
        self.status = 200;
        self.headers.clear();
        self.body = bytes.to_vec();
        self.length = Some(bytes.len() as u64);
    }

    pub fn set(&mut self, name: &str, value: &str) {
        self.headers.retain(|(k, _)| k != name);
        self.headers.push((name.into(), value.into()));
    }

    /// The body in chunks, so that no header tells its length.
    pub fn chunked(&mut self) {
        let mut out = Vec::new();
        for piece in self.body.chunks(777) {
            out.extend(format!("{:x}\r\n", piece.len()).bytes());
            out.extend_from_slice(piece);
            out.extend(b"\r\n");
        }
        out.extend(b"0\r\n\r\n");
        self.body = out;
        self.length = None;
        self.set("Transfer-Encoding", "chunked");
    }
}

/// Changes the right answer into another.
pub type Twist = Box<dyn Fn(&Request, &mut Answer) + Send + Sync>;

#[derive(Clone)]
pub struct FileOf {
    pub name: String,
    pub bytes: Vec<u8>,
    /// In large storage: hashed with SHA-256.
    pub large: bool,
}

pub struct Server {
    pub address: String,
    pub log: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    pub fn start(files: Vec<FileOf>, twist: Twist) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let log = Arc::new(Mutex::new(Vec::new()));
        let (files, twist, seen) = (Arc::new(files), Arc::new(twist), log.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (files, twist, seen) = (files.clone(), twist.clone(), seen.clone());
                std::thread::spawn(move || serve(stream, &files, &twist, &seen));
            }
        });
        Self { address, log }
    }

    pub fn requests(&self) -> Vec<Request> {
        self.log.lock().unwrap().clone()
    }
}

fn serve(stream: TcpStream, files: &[FileOf], twist: &Twist, log: &Mutex<Vec<Request>>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let Some(Ok(first)) = lines.next() else { return };
    let mut headers = HashMap::new();
    for line in lines.map_while(Result::ok).take_while(|l| !l.is_empty()) {
        if let Some((name, value)) = line.split_once(':') {
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    let path = first.split(' ').nth(1).unwrap_or("/").to_owned();
    let range = headers.get("range").and_then(|r| {
        let (a, b) = r.strip_prefix("bytes=")?.split_once('-')?;
        Some((a.parse().ok()?, b.parse::<u64>().ok()? + 1))
    });
    let request = {
        let mut log = log.lock().unwrap();
        let before = log.iter().filter(|r: &&Request| r.path == path).count();
        let token = headers.get("authorization").cloned();
        let request = Request { path, range, token, before, number: log.len() };
        log.push(request.clone());
        request
    };
    let mut answer = right(&request, files);
    twist(&request, &mut answer);
    let _ = send(stream, answer); // a client may go away at any time
}

fn send(mut stream: TcpStream, answer: Answer) -> std::io::Result<()> {
    if let Some(raw) = answer.raw {
        return stream.write_all(&raw);
    }
    let mut head = format!("HTTP/1.1 {} X\r\nConnection: close\r\n", answer.status);
    for (name, value) in &answer.headers {
        head += &format!("{name}: {value}\r\n");
    }
    if let Some(length) = answer.length {
        head += &format!("Content-Length: {length}\r\n");
    }
    stream.write_all(format!("{head}\r\n").as_bytes())?;
    let cut = answer.cut.unwrap_or(answer.body.len()).min(answer.body.len());
    stream.write_all(&answer.body[..cut])?;
    std::thread::sleep(answer.silence);
    Ok(())
}

/// The answer of a server that does as it should.
fn right(request: &Request, files: &[FileOf]) -> Answer {
    let mut answer = Answer {
        status: 404,
        headers: Vec::new(),
        body: Vec::new(),
        length: Some(0),
        cut: None,
        silence: Duration::ZERO,
        raw: None,
    };
    let list = format!("/api/models/{REPOSITORY}/revision/");
    if let Some(revision) = request.path.strip_prefix(&list) {
        if ["main?blobs=true", &format!("{COMMIT}?blobs=true")].contains(&revision) {
            answer.whole(list_of(files).as_bytes());
        }
        return answer;
    }
    // Also what a redirect points to.
    let name = request.path.strip_prefix(&format!("/{REPOSITORY}/resolve/{COMMIT}/"));
    let name = name.or_else(|| request.path.strip_prefix("/elsewhere/")).unwrap_or_default();
    let Some(file) = files.iter().find(|f| f.name == name) else { return answer };
    match request.range {
        None => answer.whole(&file.bytes),
        Some((start, end)) if start < end && end <= file.bytes.len() as u64 => {
            answer.whole(&file.bytes[start as usize..end as usize]);
            answer.status = 206;
            answer.set("Content-Range", &format!("bytes {start}-{}/{}", end - 1, file.bytes.len()));
        }
        Some(_) => answer.status(416, &[("Content-Range", &format!("bytes */{}", file.bytes.len()))]),
    }
    answer
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// The list of files as the hub's API gives it.
pub fn list_of(files: &[FileOf]) -> String {
    let one = |f: &FileOf| {
        let size = f.bytes.len();
        let blob = hex(&Sha1::digest([format!("blob {size}\0").as_bytes(), &f.bytes].concat()));
        let lfs = match f.large {
            true => format!(
                r#", "lfs": {{"sha256": "{}", "size": {size}, "pointerSize": 135}}"#,
                hex(&Sha256::digest(&f.bytes))
            ),
            false => String::new(),
        };
        format!(r#"{{"rfilename": "{}", "size": {size}, "blobId": "{blob}"{lfs}}}"#, f.name)
    };
    let all: Vec<String> = files.iter().map(one).collect();
    format!(r#"{{"id": "{REPOSITORY}", "sha": "{COMMIT}", "siblings": [{}]}}"#, all.join(", "))
}

/// Bytes that differ everywhere.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// A small repository: two large files, a small one, an empty one, one in a folder.
pub fn files() -> Vec<FileOf> {
    let file = |name: &str, bytes: Vec<u8>, large| FileOf { name: name.into(), bytes, large };
    vec![
        file("a.safetensors", noise(1, 100_003), true),
        file("b.safetensors", noise(2, 48_000), true),
        file("config.json", b"{}\n".to_vec(), false),
        file("empty", Vec::new(), false),
        file("folder/notes.txt", noise(3, 5_000), false),
    ]
}
