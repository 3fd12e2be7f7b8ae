//! Servers that break connections, lie and limit: nothing is lost, and no wrong byte is accepted.

mod server;

use std::{fs, path::Path, time::Duration};

use hub::{Client, Error, Options, Report, Repository, Silent, pull};
use server::{Answer, COMMIT, FileOf, Request, Server, Twist, files, list_of, noise};

/// Bytes of a range in these tests.
const RANGE: u64 = 16_000;

fn options(server: &Server) -> Options {
    Options {
        endpoint: server.address.clone(),
        connections: 4,
        range: RANGE,
        attempts: 4,
        pause: Duration::from_millis(2),
        silence: Duration::from_millis(400),
        ..Options::default()
    }
}

fn go(options: Options, revision: &str, out: &Path) -> hub::Result<Report> {
    let client = Client::new(options);
    let wanted = format!("{}@{revision}", server::REPOSITORY).parse().unwrap();
    let repo = Repository::resolve(&client, &wanted, &|_| {})?;
    pull(&client, &repo, out, &[], &Silent)
}

/// What must be true after every pull, whatever came of it: a file that is in its place is the right one.
fn check(out: &Path, files: &[FileOf], all: bool, what: &str) {
    for f in files {
        match fs::read(out.join(&f.name)) {
            Ok(bytes) => assert!(bytes == f.bytes, "{what}: {} has wrong bytes", f.name),
            Err(_) => assert!(!all, "{what}: {} is not there", f.name),
        }
    }
}

/// Ranges that are noted as there and have the right bytes on disk.
fn noted(out: &Path, files: &[FileOf]) -> Vec<(String, u64, u64)> {
    let mut all = Vec::new();
    for f in files {
        let base = out.join(".hallmark/parts").join(&f.name);
        let Ok(text) = fs::read_to_string(format!("{}.ranges", base.display())) else { continue };
        let part = fs::read(format!("{}.part", base.display())).unwrap();
        for line in text.lines().skip(1) {
            let words: Vec<&str> = line.split(' ').collect();
            let (start, end): (u64, u64) = (words[0].parse().unwrap(), words[1].parse().unwrap());
            let range = start as usize..end as usize;
            if part[range.clone()] == f.bytes[range] {
                all.push((f.name.clone(), start, end));
            }
        }
    }
    all
}

enum End {
    /// Everything comes in the first pull.
    Whole,
    /// The first pull ends with this exit code and these words; the next, from a good server, brings all.
    Fails(u8, &'static str),
}

struct Scenario {
    name: &'static str,
    twist: Twist,
    end: End,
    token: bool,
}

fn scenario(
    name: &'static str,
    end: End,
    twist: impl Fn(&Request, &mut Answer) + Send + Sync + 'static,
) -> Scenario {
    Scenario { name, twist: Box::new(twist), end, token: false }
}

/// A change of the answers for the first large file.
fn on_a(
    f: impl Fn(&Request, &mut Answer) + Send + Sync + 'static,
) -> impl Fn(&Request, &mut Answer) + Send + Sync {
    move |r, a| {
        if r.is_file("a.safetensors") {
            f(r, a);
        }
    }
}

fn whole_a(a: &mut Answer) {
    a.whole(&files()[0].bytes);
}

fn flip(bytes: &mut [u8], at: usize) {
    if let Some(b) = bytes.get_mut(at) {
        *b ^= 1;
    }
}

fn scenarios() -> Vec<Scenario> {
    use End::{Fails, Whole};
    let list = |change: fn(String) -> String| {
        move |r: &Request, a: &mut Answer| {
            if r.is_list() {
                a.whole(change(list_of(&files())).as_bytes());
            }
        }
    };
    vec![
        scenario("a server that does as it should", Whole, |_, _| {}),
        scenario("every connection breaks after 1,000 bytes", Whole, |r, a| {
            a.cut = (!r.is_list()).then_some(1000);
        }),
        scenario("every connection breaks after one byte of 4,999 in turn", Whole, |r, a| {
            a.cut = (!r.is_list()).then_some(1 + r.number * 4999 % 16_000);
        }),
        scenario("the first three connections break before the headers", Whole, |r, a| {
            a.raw = (r.number < 3).then(Vec::new);
        }),
        scenario("connections break within the headers", Whole, |r, a| {
            a.raw = (r.before == 0).then(|| b"HTTP/1.1 206 Partial\r\nContent-Le".to_vec());
        }),
        scenario("no HTTP at all for a while", Whole, |r, a| {
            a.raw = (r.before == 1).then(|| noise(9, 300));
        }),
        scenario(
            "one file's connections break forever",
            Fails(6, "given up after 4 tries"),
            on_a(|_, a| {
                a.raw = Some(Vec::new());
            }),
        ),
        scenario(
            "a connection goes silent in the middle",
            Whole,
            on_a(|r, a| {
                if r.before == 0 {
                    a.cut = Some(700);
                    a.silence = Duration::from_secs(3);
                }
            }),
        ),
        scenario("a wrong byte in every answer", Fails(4, "SHA-256"), on_a(|_, a| flip(&mut a.body, 5))),
        scenario(
            "a wrong byte in one range",
            Fails(4, "SHA-256"),
            on_a(|r, a| {
                if r.range.is_some_and(|(s, _)| s == 2 * RANGE) {
                    flip(&mut a.body, 100);
                }
            }),
        ),
        scenario("a wrong byte in a small file", Fails(4, "git hash"), |r, a| {
            if r.is_file("config.json") {
                flip(&mut a.body, 0);
            }
        }),
        scenario("an error page with status 206", Fails(4, "SHA-256"), on_a(|_, a| a.body.fill(b'<'))),
        scenario(
            "the total size is another",
            Fails(6, "asked for bytes"),
            on_a(|r, a| {
                let (s, e) = r.range.unwrap();
                a.set("Content-Range", &format!("bytes {s}-{}/200000", e - 1));
            }),
        ),
        scenario(
            "another range than asked for, once",
            Whole,
            on_a(|r, a| {
                if r.before == 0 {
                    a.body = files()[0].bytes[1..=a.body.len()].to_vec();
                    a.set("Content-Range", &format!("bytes 1-{}/100003", a.body.len()));
                }
            }),
        ),
        scenario("a range without saying which", Fails(6, "without a range"), on_a(|_, a| a.headers.clear())),
        scenario(
            "answers shorter than the range they name",
            Fails(6, "claims"),
            on_a(|_, a| {
                a.body.truncate(10);
                a.length = Some(10);
            }),
        ),
        scenario(
            "fewer bytes than the length says, at first",
            Whole,
            on_a(|r, a| {
                if r.before < 2 {
                    a.body.truncate(a.body.len() / 2);
                }
            }),
        ),
        scenario("chunks without a length", Whole, |r, a| {
            if !r.is_list() {
                a.chunked();
            }
        }),
        scenario(
            "chunks with more bytes than asked for",
            Fails(6, "longer than asked"),
            on_a(|_, a| {
                a.body.push(0);
                a.chunked();
            }),
        ),
        scenario(
            "compressed though not asked to be",
            Fails(6, "encoded (gzip)"),
            on_a(|_, a| {
                a.set("Content-Encoding", "gzip");
            }),
        ),
        scenario("no ranges", Whole, on_a(|_, a| whole_a(a))),
        scenario(
            "no ranges, and the first connections break",
            Whole,
            on_a(|r, a| {
                whole_a(a);
                a.cut = (r.range.is_some()).then_some(60_000);
            }),
        ),
        scenario(
            "no ranges, and a wrong byte",
            Fails(4, "SHA-256"),
            on_a(|_, a| {
                whole_a(a);
                flip(&mut a.body, 77_777);
            }),
        ),
        scenario(
            "no ranges, and a file that is longer",
            Fails(6, "the revision says 100003"),
            on_a(|_, a| {
                whole_a(a);
                a.body.push(0);
                a.length = Some(100_004);
            }),
        ),
        scenario(
            "no ranges, no length, and a byte too many",
            Fails(6, "more than 100003"),
            on_a(|_, a| {
                whole_a(a);
                a.body.push(0);
                a.chunked();
            }),
        ),
        scenario(
            "ranges from some of its machines only",
            Whole,
            on_a(|r, a| {
                if r.number % 2 == 1 {
                    whole_a(a);
                }
            }),
        ),
        scenario("relative redirects", Whole, |r, a| {
            if let Some(name) = r.path.strip_prefix(&format!("/{}/resolve/{COMMIT}/", server::REPOSITORY)) {
                a.status(302, &[("Location", &format!("/elsewhere/{name}"))]);
            }
        }),
        scenario(
            "redirects in a circle",
            Fails(6, "given up"),
            on_a(|r, a| {
                a.status(302, &[("Location", &r.path)]);
            }),
        ),
        scenario(
            "a redirect to a machine that is not there, at first",
            Whole,
            on_a(|r, a| {
                if r.before < 2 {
                    a.status(307, &[("Location", "http://127.0.0.1:9/x")]);
                }
            }),
        ),
        scenario("429 with a time to wait", Whole, |r, a| {
            if r.before == 0 {
                a.status(429, &[("Retry-After", "0")]);
            }
        }),
        scenario("503 now and then", Whole, |r, a| {
            if r.number % 3 == 1 {
                a.status(503, &[]);
            }
        }),
        scenario("500 forever", Fails(6, "HTTP 500"), on_a(|_, a| a.status(500, &[]))),
        scenario("404 for one file", Fails(6, "HTTP 404"), on_a(|_, a| a.status(404, &[]))),
        scenario("403 without a token", Fails(6, "set HF_TOKEN"), on_a(|_, a| a.status(403, &[]))),
        Scenario {
            token: true,
            ..scenario("403 with a token", Fails(6, "the token in HF_TOKEN"), on_a(|_, a| a.status(403, &[])))
        },
        scenario(
            "416 as the file is shorter than listed",
            Fails(6, "HTTP 416"),
            on_a(|_, a| a.status(416, &[])),
        ),
        scenario("a list of files that is cut short, once", Whole, |r, a| {
            if r.is_list() && r.before == 0 {
                a.body.truncate(100);
                a.length = Some(100);
            }
        }),
        scenario(
            "a list with a file outside of the folder",
            Fails(4, "no name inside"),
            list(|l| l.replace("folder/", "../")),
        ),
        scenario(
            "a list with our own files",
            Fails(4, "no name inside"),
            list(|l| l.replace("folder/", ".hallmark/")),
        ),
        scenario(
            "a list that has a file twice",
            Fails(4, "twice"),
            list(|l| l.replace("\"b.safe", "\"a.safe")),
        ),
        scenario(
            "a list without hashes",
            Fails(4, "no usable size and hash"),
            list(|l| l.replace("blobId", "blob")),
        ),
        scenario(
            "a list with another size in large storage",
            Fails(4, "no usable size"),
            list(|l| l.replace("\"size\": 48000, \"blob", "\"size\": 48001, \"blob")),
        ),
        scenario(
            "another commit than asked for",
            Fails(4, "was asked for"),
            list(|l| l.replace(COMMIT, &COMMIT.replace('0', "f"))),
        ),
        scenario("a revision that is no commit", Fails(4, "no commit"), list(|l| l.replace(COMMIT, "main"))),
        scenario(
            "more bytes than any disk has",
            Fails(5, "bytes are still to come"),
            list(|l| l.replace("\"size\": 100003", "\"size\": 100000000000000000")),
        ),
    ]
}

#[test]
fn no_fault_loses_or_accepts_wrong_bytes() {
    let files = files();
    let all = scenarios();
    assert!(all.len() >= 30, "{} scenarios", all.len());
    for s in all {
        let dir = tempfile::tempdir().unwrap();
        let (out, name) = (dir.path().join("model"), s.name);
        let bad = Server::start(files.clone(), s.twist);
        let token = s.token.then(|| "secret".to_owned());
        let first = go(Options { token, ..options(&bad) }, COMMIT, &out);
        match (&s.end, &first) {
            (End::Whole, Ok(report)) => assert_eq!((report.files, report.bytes), (5, 153_006), "{name}"),
            (End::Fails(code, words), Err(e)) => {
                assert_eq!(e.exit_code(), *code, "{name}: {e}");
                assert!(e.to_string().contains(words), "{name}: {e}");
            }
            (_, other) => panic!("{name}: {other:?}"),
        }
        check(&out, &files, first.is_ok(), name);
        if let Err(Error::Mismatch { kept, .. }) = &first {
            assert!(kept.exists(), "{name}: {} is named but not kept", kept.display());
        }
        // A good server makes it whole, and is not asked again for what had come.
        let have = noted(&out, &files);
        let good = Server::start(files.clone(), Box::new(|_, _| {}));
        go(options(&good), "main", &out).unwrap_or_else(|e| panic!("{name}: {e}"));
        check(&out, &files, true, name);
        for r in good.requests() {
            let Some((start, end)) = r.range else { continue };
            let again = have.iter().find(|(f, s, e)| r.is_file(f) && start < *e && *s < end);
            assert!(again.is_none(), "{name}: {again:?} was fetched again by {r:?}");
        }
        // And nothing at all is asked for once it is whole.
        let third = go(options(&good), "main", &out).unwrap();
        assert_eq!((third.downloaded, third.kept), (0, 153_006), "{name}");
    }
}

/// Each request meets a fault or not, by a seed: a pull that is called again ends whole.
#[test]
fn random_faults_end_whole() {
    let files = files();
    for seed in 0..12u64 {
        let dir = tempfile::tempdir().unwrap();
        let die = noise(seed + 50, 4096);
        let twist: Twist = Box::new(move |r, a| {
            let roll = die[r.number % die.len()];
            match roll % 8 {
                0 if !r.is_list() => a.cut = Some(usize::from(roll) * 60),
                1 => a.status(503, &[]),
                2 => a.raw = Some(Vec::new()),
                3 if r.is_file("b.safetensors") && r.before < 3 => flip(&mut a.body, 9),
                _ => {}
            }
        });
        let server = Server::start(files.clone(), twist);
        let mut calls = 0;
        while let Err(e) = go(options(&server), "main", dir.path()) {
            check(dir.path(), &files, false, "random");
            calls += 1;
            assert!(calls < 30, "seed {seed}: {e}");
        }
        check(dir.path(), &files, true, "random");
    }
}

#[test]
fn a_token_goes_to_the_endpoint_and_to_nobody_else() {
    let files = files();
    let other = Server::start(files.clone(), Box::new(|_, _| {}));
    let address = other.address.replace("127.0.0.1", "localhost");
    let twist: Twist = Box::new(move |r, a| {
        if let Some(name) = r.path.strip_prefix(&format!("/{}/resolve/{COMMIT}/", server::REPOSITORY)) {
            a.status(302, &[("Location", &format!("{address}/elsewhere/{name}"))]);
        }
    });
    let server = Server::start(files.clone(), twist);
    let dir = tempfile::tempdir().unwrap();
    let token = Some("secret".to_owned());
    go(Options { token, ..options(&server) }, "main", dir.path()).unwrap();
    check(dir.path(), &files, true, "redirect");
    assert!(server.requests().iter().all(|r| r.token.as_deref() == Some("Bearer secret")));
    assert!(!other.requests().is_empty() && other.requests().iter().all(|r| r.token.is_none()));
    assert!(other.requests().iter().all(|r| r.range.is_some()));
}

#[test]
fn a_damaged_part_is_fetched_again_where_it_is_damaged() {
    let files = files();
    let twist = on_a(|r: &Request, a: &mut Answer| {
        if r.range.is_some_and(|(s, _)| s >= 5 * RANGE) {
            a.status(404, &[]);
        }
    });
    let server = Server::start(files.clone(), Box::new(twist));
    let dir = tempfile::tempdir().unwrap();
    go(Options { connections: 1, ..options(&server) }, "main", dir.path()).unwrap_err();
    let part = dir.path().join(".hallmark/parts/a.safetensors.part");
    let mut bytes = fs::read(&part).unwrap();
    flip(&mut bytes, RANGE as usize + 3);
    fs::write(&part, bytes).unwrap();
    let good = Server::start(files.clone(), Box::new(|_, _| {}));
    go(options(&good), "main", dir.path()).unwrap();
    check(dir.path(), &files, true, "damaged");
    let ranges: Vec<_> =
        good.requests().iter().filter(|r| r.is_file("a.safetensors")).filter_map(|r| r.range).collect();
    assert!(ranges.contains(&(RANGE, 2 * RANGE)) && !ranges.contains(&(0, RANGE)), "{ranges:?}");
}

#[test]
fn a_strangers_file_is_left_alone_and_our_own_is_replaced() {
    let files = files();
    let server = Server::start(files.clone(), Box::new(|_, _| {}));
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), "mine").unwrap();
    let e = go(options(&server), "main", dir.path()).unwrap_err();
    assert!(matches!(&e, Error::Occupied(p) if p.ends_with("config.json")) && e.exit_code() == 4, "{e}");
    assert_eq!(fs::read(dir.path().join("config.json")).unwrap(), b"mine");
    assert!(server.requests().iter().all(Request::is_list));
    fs::remove_file(dir.path().join("config.json")).unwrap();
    go(options(&server), "main", dir.path()).unwrap();
    // A later commit: what a pull has written is replaced, once the new bytes are verified.
    let mut next = files;
    next[2].bytes = b"{\"a\": 1}\n".to_vec();
    next[0].bytes = noise(8, 70_000);
    let later = Server::start(next.clone(), Box::new(|_, _| {}));
    let report = go(options(&later), "main", dir.path()).unwrap();
    check(dir.path(), &next, true, "later");
    assert_eq!(report.downloaded, 70_009);
    // What is changed by hand after that is not: it is refused.
    fs::write(dir.path().join("config.json"), "{\"a\": 2}\n").unwrap();
    assert!(matches!(go(options(&later), "main", dir.path()).unwrap_err(), Error::Occupied(_)));
}

#[test]
fn two_pulls_do_not_share_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join(".hallmark")).unwrap();
    let lock = fs::File::create(dir.path().join(".hallmark/lock")).unwrap();
    lock.lock().unwrap();
    let server = Server::start(files(), Box::new(|_, _| {}));
    assert!(matches!(go(options(&server), "main", dir.path()).unwrap_err(), Error::Busy(_)));
}
