//! States as bytes.

use super::*;
use crate::{
    Error, Snapshot,
    sealed::{Kind, Unsealed, VERSION, Writer, seal, unseal},
};

#[test]
fn a_snapshot_restores_every_bit() {
    for name in MODELS {
        let model = load(name, Mode::Native);
        let ids = random_ids(&model, 100, 4);
        for len in [1, 2, 3, 15, 16, 17, 33, 64, 75] {
            let (state, _) = prefilled(&model, &ids[..len], 100);
            let snapshot = model.snapshot(&state).unwrap();
            let bytes = snapshot.to_bytes(model.identity());
            let read = Snapshot::from_bytes(&bytes, model.identity(), &model.layout()).unwrap();
            assert!(read == snapshot, "{name} at {len}: through bytes");
            let mut back = model.restore(&read, 100).unwrap();
            assert!(model.snapshot(&back).unwrap() == snapshot, "{name} at {len}: restored");
            // A block of drafts right after it can be taken back.
            let rest = &ids[len..len + 20];
            step(&model, &mut back, &[&rest[..1], &random_ids(&model, model.slack(), 9)].concat());
            model.truncate(&mut back, len + 1).unwrap();
            let got = step(&model, &mut back, &rest[1..]).pop().unwrap();
            assert_eq!(bits(&got), bits(&prefilled(&model, &ids[..len + 20], 100).1), "{name} from {len}");
        }
    }
}

#[test]
fn a_snapshot_too_long_for_the_context_is_refused() {
    let model = load("nano", Mode::Native);
    let (state, _) = prefilled(&model, &random_ids(&model, 40, 1), 40);
    let error = model.restore(&model.snapshot(&state).unwrap(), 39).err().unwrap();
    assert!(matches!(error, Error::Context { need: 40, context: 39 }), "{error}");
}

#[test]
fn damaged_bytes_are_refused() {
    let model = load("nano", Mode::Native);
    let (state, _) = prefilled(&model, &random_ids(&model, 35, 6), 40);
    let bytes = model.snapshot(&state).unwrap().to_bytes(model.identity());
    let read = |b: &[u8]| Snapshot::from_bytes(b, model.identity(), &model.layout());
    read(&bytes).unwrap();
    let mut random = Random(1);
    let header = 8 + 4 + 4 + 32 + 8;
    for i in 0..header + if full() { 5000 } else { 300 } {
        let at = if i < header { i } else { random.below(bytes.len()) };
        let mut bad = bytes.clone();
        bad[at] ^= 1 << random.below(8);
        read(&bad).err().unwrap_or_else(|| panic!("a flipped bit in byte {at} goes unseen"));
        let cut = random.below(bytes.len());
        read(&bytes[..cut]).err().unwrap_or_else(|| panic!("{cut} of {} bytes pass", bytes.len()));
    }
    read(&[bytes.as_slice(), &[0]].concat()).unwrap_err();
}

/// With a right checksum too: the sizes inside are checked before they are used.
#[test]
fn contents_that_lie_are_refused() {
    let model = load("nano", Mode::Native);
    let (state, _) = prefilled(&model, &random_ids(&model, 35, 6), 40);
    let bytes = model.snapshot(&state).unwrap().to_bytes(model.identity());
    let contents = &bytes[56..bytes.len() - 32];
    let sealed = |contents: &[u8]| {
        let mut all = [b"hallmark".as_slice(), &VERSION.to_le_bytes(), &1u32.to_le_bytes()].concat();
        all.extend_from_slice(model.identity());
        all.extend_from_slice(&(contents.len() as u64).to_le_bytes());
        all.extend_from_slice(contents);
        let sum = <sha2::Sha256 as sha2::Digest>::digest(&all);
        [all.as_slice(), &sum].concat()
    };
    assert_eq!(sealed(contents), bytes);
    let mut random = Random(2);
    let mut refused = 0;
    for _ in 0..2000 {
        let mut bad = contents.to_vec();
        // The numbers: length, history, windows, open groups, page.
        let at = [0, 8, 28, 28 + 8 + model.layout().window_bytes(35), bad.len() - 16][random.below(5)];
        let value = if random.below(2) == 0 { random.next() } else { random.below(1 << 20) as u64 };
        let at = at.min(bad.len() - 8);
        bad[at..at + 8].copy_from_slice(&value.to_le_bytes());
        refused +=
            usize::from(Snapshot::from_bytes(&sealed(&bad), model.identity(), &model.layout()).is_err());
    }
    // Numbers that hit values in place of sizes change values, which the checksum of a real file would tell.
    assert!(refused > 1000, "{refused} of 2000 refused");
}

#[test]
fn each_refusal_says_why() {
    let identity = [7; 32];
    let mut contents = Writer::default();
    contents.size(3);
    let bytes = seal(Kind::Page, &identity, &contents);
    let why = |b: &[u8], kind| unseal(b, kind, &identity).map(|_| ()).unwrap_err();
    unseal(&bytes, Kind::Page, &identity).unwrap();
    assert_eq!(why(&bytes, Kind::Tail), Unsealed::Kind);
    assert_eq!(why(b"halfmark", Kind::Page), Unsealed::Magic);
    assert_eq!(unseal(&bytes, Kind::Page, &[8; 32]).unwrap_err(), Unsealed::Identity);
    let mut newer = bytes.clone();
    newer[8] = 2;
    assert_eq!(why(&newer, Kind::Page), Unsealed::Version(2));
    assert_eq!(why(&bytes[..bytes.len() - 1], Kind::Page), Unsealed::Length);
    let mut damaged = bytes.clone();
    damaged[60] ^= 1;
    assert_eq!(why(&damaged, Kind::Page), Unsealed::Checksum);
}

#[test]
fn states_of_other_numerics_and_models_are_refused() {
    let (model, other) = (load("nano", Mode::Native), load("nano", Mode::Exact));
    assert_ne!(model.identity(), other.identity());
    assert_ne!(model.identity(), load("micro", Mode::Native).identity());
    assert_eq!(model.identity(), load("nano", Mode::Native).identity());
    let (state, _) = prefilled(&model, &random_ids(&model, 20, 6), 40);
    let bytes = model.snapshot(&state).unwrap().to_bytes(model.identity());
    let error = Snapshot::from_bytes(&bytes, other.identity(), &other.layout()).unwrap_err();
    assert!(matches!(error, Error::Kept(Unsealed::Identity)), "{error}");
}
