//! Requests: addresses, the token, redirects, and when to try again.

use std::{
    io::Read,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use ureq::{Agent, Body, http::Response};

use crate::{Error, Result};

/// Longest wait that a server can ask for.
const MAX_WAIT: Duration = Duration::from_secs(300);

/// How requests are made.
#[derive(Clone)]
pub struct Options {
    /// Address of the server, without a slash at the end.
    pub endpoint: String,
    /// Token of the user; sent to the endpoint only, not to the hosts that it redirects to.
    pub token: Option<String>,
    /// Requests at a time.
    pub connections: usize,
    /// Bytes of one request.
    pub range: u64,
    /// Tries of a request that brings nothing before it is given up.
    pub attempts: u32,
    /// Wait before the second try; doubles with every further one up to 30 s.
    pub pause: Duration,
    /// Longest silence of a connection.
    pub silence: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            endpoint: "https://huggingface.co".into(),
            token: None,
            connections: 8,
            range: 32 << 20,
            attempts: 8,
            pause: Duration::from_millis(500),
            silence: Duration::from_secs(60),
        }
    }
}

impl Options {
    /// As by default, with `HF_ENDPOINT` and `HF_TOKEN` where they are set.
    pub fn from_env() -> Self {
        let set = |name| std::env::var(name).ok().map(|v| v.trim().to_owned()).filter(|v| !v.is_empty());
        let mut options = Self { token: set("HF_TOKEN"), ..Self::default() };
        if let Some(endpoint) = set("HF_ENDPOINT") {
            options.endpoint = endpoint.trim_end_matches('/').to_owned();
        }
        options
    }
}

/// Why one try failed.
pub(crate) enum Trouble {
    /// Another try may help, after a wait that the server may have set.
    Again { what: String, after: Option<Duration> },
    /// It will not.
    Final(Error),
}

impl Trouble {
    pub(crate) fn again(what: impl Into<String>) -> Self {
        Trouble::Again { what: what.into(), after: None }
    }
}

/// A connection pool to one server.
pub struct Client {
    agent: Agent,
    pub(crate) options: Options,
}

impl Client {
    /// A client; nothing is sent yet.
    pub fn new(options: Options) -> Self {
        let agent = Agent::config_builder()
            .https_only(options.endpoint.starts_with("https://"))
            .http_status_as_error(false)
            .max_redirects(10)
            .redirect_auth_headers(ureq::config::RedirectAuthHeaders::SameHost)
            .user_agent(concat!("hallmark/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .max_idle_connections_per_host(options.connections)
            .timeout_connect(Some(Duration::from_secs(20)))
            .timeout_recv_response(Some(options.silence))
            .timeout_per_read(Some(options.silence))
            .build()
            .new_agent();
        Self { agent, options }
    }

    /// One try of a request for the bytes `range` of `url`, or for all.
    pub(crate) fn get(
        &self,
        url: &str,
        range: Option<(u64, u64)>,
    ) -> std::result::Result<Response<Body>, Trouble> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.options.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if let Some((start, end)) = range {
            request = request.header("Range", format!("bytes={start}-{}", end - 1));
        }
        let response = request.call().map_err(|e| self.failed(url, e))?;
        let status = response.status().as_u16();
        let fatal = |what: &str| {
            Err(Trouble::Final(Error::Server { url: url.into(), what: format!("HTTP {status}: {what}") }))
        };
        match status {
            200 | 206 => {}
            401 | 403 if self.options.token.is_none() => {
                return fatal(
                    "not public, or its terms are not accepted; set HF_TOKEN to a token that may read it",
                );
            }
            401 | 403 => return fatal("the token in HF_TOKEN may not read it"),
            404 | 410 => return fatal("there is no such repository, revision or file"),
            408 | 425 | 429 | 500..=599 | 416 => {
                let after = header(&response, "retry-after").and_then(|v| v.trim().parse().ok());
                let after = after.map(|s| Duration::from_secs(s).min(MAX_WAIT));
                return Err(Trouble::Again { what: format!("HTTP {status}"), after });
            }
            _ => return fatal("not an answer to this request"),
        }
        match header(&response, "content-encoding") {
            None | Some("identity") => Ok(response),
            Some(other) => {
                Err(Trouble::again(format!("the answer is encoded ({other}) though not asked to be")))
            }
        }
    }

    /// A small document, with all tries.
    pub(crate) fn document(&self, url: &str, limit: u64, note: &dyn Fn(&str)) -> Result<Vec<u8>> {
        self.retry(url, note, || {
            let response = self.get(url, None)?;
            let want = response.body().content_length();
            let mut out = Vec::new();
            let read = response.into_body().into_reader().take(limit + 1).read_to_end(&mut out);
            read.map_err(|e| Trouble::again(format!("the connection broke ({e})")))?;
            if out.len() as u64 > limit {
                let what = format!("has more than {limit} bytes");
                return Err(Trouble::Final(Error::Server { url: url.into(), what }));
            }
            match want {
                Some(want) if want != out.len() as u64 => {
                    Err(Trouble::again(format!("{} of {want} bytes came", out.len())))
                }
                _ => Ok(out),
            }
        })
    }

    /// Calls `once` until it succeeds, fails for good or has used up its tries.
    pub(crate) fn retry<T>(
        &self,
        url: &str,
        note: &dyn Fn(&str),
        mut once: impl FnMut() -> std::result::Result<T, Trouble>,
    ) -> Result<T> {
        let mut tries = 0;
        loop {
            match once() {
                Ok(value) => return Ok(value),
                Err(trouble) => self.pause(url, trouble, &mut tries, note)?,
            }
        }
    }

    /// Waits before the next try, or gives up.
    pub(crate) fn pause(
        &self,
        url: &str,
        trouble: Trouble,
        tries: &mut u32,
        note: &dyn Fn(&str),
    ) -> Result<()> {
        self.pause_until(url, trouble, tries, note, &|| false)
    }

    /// As [`Client::pause`], cut short when `stop` says so.
    pub(crate) fn pause_until(
        &self,
        url: &str,
        trouble: Trouble,
        tries: &mut u32,
        note: &dyn Fn(&str),
        stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        if stop() {
            return Ok(());
        }
        let (what, after) = match trouble {
            Trouble::Final(e) => return Err(e),
            Trouble::Again { what, after } => (what, after),
        };
        *tries += 1;
        if *tries >= self.options.attempts {
            let what = format!("{what}; given up after {tries} tries, what came is kept for the next pull");
            return Err(Error::Server { url: url.into(), what });
        }
        let base = self.options.pause * (1 << (*tries - 1).min(10));
        let base = base.min(Duration::from_secs(30));
        // Spread, so that parallel requests do not come back at once.
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.subsec_nanos());
        let wait = after.unwrap_or(base.mul_f64(0.75 + f64::from(nanos % 1000) / 2000.0));
        note(&format!("{url}: {what}; trying again in {:.1} s", wait.as_secs_f64()));
        let end = Instant::now() + wait;
        while let Some(left) = end.checked_duration_since(Instant::now())
            && !stop()
        {
            std::thread::sleep(left.min(Duration::from_millis(100)));
        }
        Ok(())
    }

    fn failed(&self, url: &str, e: ureq::Error) -> Trouble {
        use ureq::Error::{BadUri, InvalidProxyUrl, RequireHttpsOnly, Tls};
        let fatal = matches!(e, BadUri(_) | InvalidProxyUrl | RequireHttpsOnly(_) | Tls(_));
        if fatal {
            return Trouble::Final(Error::Server { url: url.into(), what: format!("{e}") });
        }
        Trouble::again(format!("{e}"))
    }
}

/// A header's text.
pub(crate) fn header<'a>(response: &'a Response<Body>, name: &str) -> Option<&'a str> {
    response.headers().get(name).and_then(|v| v.to_str().ok())
}

/// One path component, or several with `keep` as `/`, for an address.
pub(crate) fn encode(text: &str, slashes: bool) -> String {
    let mut out = String::new();
    for b in text.bytes() {
        match b {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(b as char),
            b'/' if slashes => out.push('/'),
            _ => out.push_str(&format!("%{b:02X}")),
        }
    }
    out
}
