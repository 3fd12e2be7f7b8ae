//! Parts of a model, and headers alone.

mod server;

use std::{collections::BTreeMap, fs, sync::atomic::AtomicBool};

use checkpoint::{
    Checkpoint, generate,
    write::{self, Item},
};
use hub::{Client, Options, Part, Repository, Silent, headers, pull, verify};
use server::{FileOf, Server};

/// The nano model in a shard a part, with the index of them.
fn nano() -> Vec<FileOf> {
    let dir = tempfile::tempdir().unwrap();
    let mut tensors = Vec::new();
    let mut files = Vec::new();
    for entry in fs::read_dir(generate::cached("nano").unwrap()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if name.ends_with(".safetensors") {
            tensors.extend(write::read_shard_file(&path).unwrap());
        } else if !name.ends_with(".index.json") && path.is_file() {
            files.push(FileOf { name, bytes: fs::read(&path).unwrap(), large: false });
        }
    }
    let mut index = BTreeMap::new();
    for part in Part::ALL {
        let name = format!("{part}.safetensors");
        let own: Vec<_> = tensors.iter().filter(|t| Part::of(&t.0) == part).collect();
        assert!(!own.is_empty(), "nano has no {part}");
        let items: Vec<Item> =
            own.iter().map(|(name, dtype, shape, data)| Item { name, dtype: *dtype, shape, data }).collect();
        write::write_shard(&dir.path().join(&name), &items).unwrap();
        own.iter().for_each(|t| drop(index.insert(t.0.clone(), name.clone())));
        files.push(FileOf { bytes: fs::read(dir.path().join(&name)).unwrap(), name, large: true });
    }
    let path = dir.path().join("model.safetensors.index.json");
    write::write_index(&path, 0, index.iter().map(|(t, f)| (t.as_str(), f.as_str()))).unwrap();
    let bytes = fs::read(path).unwrap();
    files.push(FileOf { name: "model.safetensors.index.json".into(), bytes, large: true });
    files
}

fn client(server: &Server) -> (Client, Repository) {
    let options = Options { endpoint: server.address.clone(), ..Options::default() };
    let client = Client::new(options);
    let wanted = format!("{}@main", server::REPOSITORY).parse().unwrap();
    let repo = Repository::resolve(&client, &wanted, &|_| {}).unwrap();
    (client, repo)
}

#[test]
fn a_part_alone_comes_with_its_shards_only_and_opens() {
    let server = Server::start(nano(), Box::new(|_, _| {}));
    let (client, repo) = client(&server);
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("text");
    let report = pull(&client, &repo, &text, &[Part::Text], &Silent).unwrap();
    assert_eq!(report.left_out, ["dspark.safetensors", "engram.safetensors", "vision.safetensors"]);
    assert!(text.join("text.safetensors").exists() && !text.join("engram.safetensors").exists());
    // Without its Engram tables it says where they can come from; with them it is whole but for what was left out.
    let missing = Checkpoint::open(&text).unwrap_err();
    assert!(missing.to_string().contains("--engram-from"), "{missing}");
    let tables = dir.path().join("tables");
    pull(&client, &repo, &tables, &[Part::Engram], &Silent).unwrap();
    let model = Checkpoint::open_with(&text, Some(&tables)).unwrap();
    assert!(!model.has_dspark() && !model.has_vision());
    // A second call brings the rest, and nothing twice.
    let all = pull(&client, &repo, &text, &[], &Silent).unwrap();
    let left: u64 = report.left_out.iter().map(|f| repo.file(f).unwrap().size).sum();
    assert_eq!((all.downloaded, all.kept), (left, report.bytes));
    let model = Checkpoint::open(&text).unwrap();
    assert!(model.has_dspark() && model.has_vision());
}

#[test]
fn a_shard_of_the_text_may_not_be_absent() {
    let dir = tempfile::tempdir().unwrap();
    for f in nano().iter().filter(|f| f.name != "text.safetensors") {
        fs::write(dir.path().join(&f.name), &f.bytes).unwrap();
    }
    let e = Checkpoint::open(dir.path()).unwrap_err();
    assert!(e.to_string().contains("text.safetensors, which does not exist"), "{e}");
}

/// What is checked stays checked until it changes; a call that is stopped is taken up by the next.
#[test]
fn hashes_are_checked_again_and_taken_up_where_it_stopped() {
    let server = Server::start(nano(), Box::new(|_, _| {}));
    let (client, repo) = client(&server);
    let dir = tempfile::tempdir().unwrap();
    let (go, stop) = (AtomicBool::new(false), AtomicBool::new(true));
    assert_eq!(verify(dir.path(), &go).unwrap_err().exit_code(), 4);
    let all = pull(&client, &repo, dir.path(), &[], &Silent).unwrap();
    let none = verify(dir.path(), &stop).unwrap();
    assert_eq!((none.files, none.left, none.bytes), (0, all.files, 0));
    let whole = verify(dir.path(), &go).unwrap();
    assert_eq!((whole.files, whole.left, whole.bytes), (all.files, 0, all.bytes));
    assert_eq!(verify(dir.path(), &go).unwrap().bytes, 0);
    let path = dir.path().join("text.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, bytes).unwrap();
    let e = verify(dir.path(), &go).unwrap_err();
    assert!(e.to_string().contains("text.safetensors: its SHA-256") && e.exit_code() == 4, "{e}");
}

/// Headers of any length are the true ones, and no weight is read.
#[test]
fn headers_come_without_weights() {
    let files = nano();
    let server = Server::start(files.clone(), Box::new(|_, _| {}));
    let (client, repo) = client(&server);
    let dir = tempfile::tempdir().unwrap();
    headers(&client, &repo, dir.path(), &|_| {}).unwrap();
    let remote = Checkpoint::open_headers(dir.path()).unwrap();
    let whole = tempfile::tempdir().unwrap();
    pull(&client, &repo, whole.path(), &[], &Silent).unwrap();
    let local = Checkpoint::open_headers(whole.path()).unwrap();
    assert_eq!(remote.tensors(), local.tensors());
    let most = 1 << 20;
    let headers = server.requests().into_iter().filter(|r| r.range.is_some_and(|(s, e)| s == 0 && e <= most));
    assert!(headers.count() >= Part::ALL.len());
}

#[test]
fn a_server_without_ranges_gives_no_headers() {
    let files = nano();
    let shards = files.clone();
    let server = Server::start(
        files,
        Box::new(move |r, a| {
            if let Some(f) = shards.iter().find(|f| r.is_file(&f.name)) {
                a.whole(&f.bytes);
            }
        }),
    );
    let (client, repo) = client(&server);
    let dir = tempfile::tempdir().unwrap();
    let e = headers(&client, &repo, dir.path(), &|_| {}).unwrap_err();
    assert!(e.to_string().contains("sends no ranges") && e.exit_code() == 6, "{e}");
}
