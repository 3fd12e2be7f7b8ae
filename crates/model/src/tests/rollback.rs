//! Taking tokens back: every later bit as if they had never been, and each piece of it is needed.

use cpu::Cpu;
use ops::{Host, Mode, Taps};

use super::*;
use crate::{Error, Walk, state::ring_slots};

/// Feeds `ids` in random steps, now and then with wrong tokens behind, which are taken back.
fn with_detours(model: &Model<Cpu>, ids: &[u32], seed: u64) -> (State<Cpu>, Vec<f32>) {
    let (mut random, mut state) = (Random(seed), model.new_state(ids.len() + 8).unwrap());
    let mut last = Vec::new();
    while state.len() < ids.len() {
        let rest = ids.len() - state.len();
        let most = [1, 3, 40][random.below(3)];
        let right = 1 + random.below(rest.min(most));
        let wrong = random.below(model.slack() + 1);
        let mut step_ids = ids[state.len()..][..right].to_vec();
        step_ids.extend(random_ids(model, wrong, random.next()));
        let keep = state.len() + right;
        let split = random.below(2) == 0;
        let logits = if split && wrong > 0 {
            let logits = step(model, &mut state, &step_ids[..right]);
            for id in &step_ids[right..] {
                step(model, &mut state, &[*id]);
            }
            logits
        } else {
            step(model, &mut state, &step_ids)
        };
        // In one go or token by token.
        if split && wrong > 1 {
            model.truncate(&mut state, keep + 1).unwrap();
        }
        model.truncate(&mut state, keep).unwrap();
        last = logits[right - 1].clone();
    }
    (state, last)
}

#[test]
fn tokens_taken_back_leave_no_trace() {
    for name in MODELS {
        for mode in MODES {
            let model = load(name, mode);
            for seed in 0..if full() { 30 } else { 3 } {
                let ids = random_ids(&model, 90 + seed as usize % 2, seed);
                let (state, logits) = with_detours(&model, &ids, 1000 + seed);
                let (straight, want) = prefilled(&model, &ids, ids.len());
                assert_eq!(bits(&logits), bits(&want), "{name} {mode:?} {seed}: logits");
                let (got, want) = (model.snapshot(&state).unwrap(), model.snapshot(&straight).unwrap());
                assert!(got == want, "{name} {mode:?} {seed}: state");
                let next = ids[7];
                let (got, want) = (model.draft(&state, next).unwrap(), model.draft(&straight, next).unwrap());
                let (got, want) = (got.unwrap(), want.unwrap());
                assert_eq!(bits(got.logits.as_f32()), bits(want.logits.as_f32()), "{name} {mode:?}: drafts");
            }
        }
    }
}

#[test]
fn the_oldest_length_is_kept_and_named() {
    let model = load("nano", Mode::Exact);
    let ids = random_ids(&model, 60, 1);
    let (mut state, _) = prefilled(&model, &ids[..50], 60);
    let oldest = 50 - model.slack();
    assert_eq!(state.oldest(), oldest);
    let error = model.truncate(&mut state, oldest - 1).unwrap_err();
    assert!(
        matches!(error, Error::Truncate { len, oldest: o } if len == oldest - 1 && o == oldest),
        "{error}"
    );
    assert_eq!(state.len(), 50, "a refused truncation changes nothing");
    model.truncate(&mut state, oldest).unwrap();
    // What was overwritten before stays overwritten.
    step(&model, &mut state, &ids[oldest..=oldest]);
    assert_eq!(state.oldest(), oldest);
    model.truncate(&mut state, 0).unwrap();
    assert_eq!(state.oldest(), 0);
    let again = step(&model, &mut state, &ids[..33]).pop().unwrap();
    assert_eq!(bits(&again), bits(&prefilled(&model, &ids[..33], 60).1));
}

#[test]
fn a_fork_is_independent() {
    let model = load("micro", Mode::Native);
    let ids = random_ids(&model, 80, 2);
    let (mut state, _) = prefilled(&model, &ids[..41], 120);
    let mut fork = state.clone();
    step(&model, &mut fork, &ids[50..70]);
    let got = step(&model, &mut state, &ids[41..60]).pop().unwrap();
    assert_eq!(bits(&got), bits(&prefilled(&model, &ids[..60], 120).1));
    let other = [&ids[..41], &ids[50..70], &ids[3..4]].concat();
    assert_eq!(bits(&step(&model, &mut fork, &ids[3..4])[0]), bits(&prefilled(&model, &other, 120).1));
}

/// What a rollback restores or must not carry over.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Piece {
    RingSlot,
    DraftRingSlot,
    OpenGroup,
    Entry,
    IndexKey,
    History,
    Candidates,
}

/// Verification rounds as speculative decoding makes them: the right tokens and wrong drafts behind, taken back; `broken`
/// is left as a rollback would leave it that forgot it. Returns the logits after every token and those of the drafts.
fn rounds(model: &Model<Cpu>, ids: &[u32], broken: Option<Piece>) -> (Vec<Vec<f32>>, Vec<Vec<u32>>) {
    let start = 40;
    let (mut state, _) = prefilled(model, &ids[..start], ids.len() + 8);
    let (mut logits, mut drafts) = (Vec::new(), Vec::new());
    let mut random = Random(5);
    while state.len() < ids.len() {
        let before = state.len();
        let right = (1 + random.below(model.slack())).min(ids.len() - before);
        let wrong = 1 + model.slack() - right.min(model.slack());
        let mut step_ids = ids[before..][..right].to_vec();
        step_ids.extend(random_ids(model, wrong, random.next()));
        let mut walk = model.start(&mut state, Input::text(&step_ids)).unwrap();
        while model.advance(&mut walk, &mut state, &mut Taps::off()).unwrap() {}
        let mask = walk.selection.candidates.clone();
        let out = model.finish(walk, &mut state, Rows::All, &mut Taps::off()).unwrap().unwrap();
        logits.extend((0..right).map(|r| out.logits.row(r).to_vec()));
        let rejected = state.clone();
        model.truncate(&mut state, before + right).unwrap();
        if let Some(piece) = broken {
            forget(model, &mut state, &rejected, piece);
        }
        // The token after the kept ones, so that every piece is read at once.
        if let Some(id) = ids.get(state.len()) {
            let mut walk = model.start(&mut state, Input::text(&[*id])).unwrap();
            advance(model, &mut walk, &mut state, mask.filter(|_| broken == Some(Piece::Candidates)));
            let out = model.finish(walk, &mut state, Rows::All, &mut Taps::off()).unwrap().unwrap();
            logits.push(out.logits.row(0).to_vec());
            if let (Some(Piece::Entry | Piece::IndexKey), Some(piece)) = (broken, broken) {
                forget(model, &mut state, &rejected, piece);
            }
        }
        drafts.push(bits(model.draft(&state, 3).unwrap().unwrap().logits.as_f32()));
    }
    (logits, drafts)
}

/// All layers; with a mask, those behind the candidate source take it in place of the step's own.
fn advance(model: &Model<Cpu>, walk: &mut Walk<Cpu>, state: &mut State<Cpu>, mask: Option<Host>) {
    let source = model.config().candidate_source_layer_id;
    while model.advance(walk, state, &mut Taps::off()).unwrap() {
        if let (true, Some(mask), Some(own)) = (walk.layer() == source + 1, &mask, &walk.selection.candidates)
        {
            // The first rejected row's choice, over as many blocks as there are now.
            let (blocks, stale) = (own.width(), mask.code_row(mask.rows() - 1));
            walk.selection.candidates = Some(Host::u8(&[1, blocks], stale[..blocks].to_vec()));
        }
    }
}

/// Undoes one part of a truncation.
fn forget(model: &Model<Cpu>, state: &mut State<Cpu>, rejected: &State<Cpu>, piece: Piece) {
    let (c, len) = (model.config(), state.len());
    match piece {
        Piece::RingSlot | Piece::DraftRingSlot => {
            // A ring without slack: the last rejected row lies where the oldest row of the next window was.
            let (last, oldest) = (rejected.len() - 1, (len + 1).saturating_sub(c.sliding_window));
            let slots = ring_slots(c);
            let rings = match piece {
                Piece::RingSlot => &mut state.windows,
                _ => &mut state.draft.as_mut().unwrap().rings,
            };
            for ring in rings {
                let row = ring.code_row(last % slots).to_vec();
                let width = row.len();
                ring.as_u8_mut()[oldest % slots * width..][..width].copy_from_slice(&row);
            }
        }
        Piece::OpenGroup => {
            for (global, old) in state.globals.iter_mut().zip(&rejected.globals) {
                if let (Some(global), Some(old)) = (global, old) {
                    global.open = old.open.clone().or(global.open.take());
                }
            }
        }
        Piece::Entry | Piece::IndexKey => {
            for (l, (global, old)) in state.globals.iter_mut().zip(&rejected.globals).enumerate() {
                let (Some(global), Some(old)) = (global, old) else { continue };
                let ratio = c.layer(l).ratio;
                // From the first entry that a rejected token completed.
                let first = (len - usize::from(rejected.len() > len && len > 0)) / ratio;
                let count = (rejected.len() / ratio).saturating_sub(first);
                let (cache, stale) = match piece {
                    Piece::Entry => (&mut global.kv, &old.kv),
                    _ => (&mut global.keys, &old.keys),
                };
                let width = cache.width();
                let range = first * width..(first + count) * width;
                cache.as_u8_mut()[range.clone()].copy_from_slice(&stale.as_u8()[range]);
            }
        }
        Piece::History => state.history = rejected.history.clone(),
        Piece::Candidates => {}
    }
}

#[test]
fn every_piece_of_a_rollback_is_needed() {
    for name in ["nano", "micro"] {
        let model = load(name, Mode::Native);
        let ids = random_ids(&model, 120, 3);
        let (want, drafts) = rounds(&model, &ids, None);
        let (straight, _) = prefilled(&model, &ids[..40], ids.len() + 8);
        let mut state = straight;
        let logits = step(&model, &mut state, &ids[40..]);
        assert!(want.iter().map(|l| bits(l)).eq(logits.iter().map(|l| bits(l))), "{name}: unbroken");
        for piece in [
            Piece::RingSlot,
            Piece::DraftRingSlot,
            Piece::OpenGroup,
            Piece::Entry,
            Piece::IndexKey,
            Piece::History,
            Piece::Candidates,
        ] {
            let (got, got_drafts) = rounds(&model, &ids, Some(piece));
            let same = got.iter().map(|l| bits(l)).eq(want.iter().map(|l| bits(l))) && got_drafts == drafts;
            assert!(!same, "{name}: {piece:?} can be forgotten unseen");
        }
    }
}

#[test]
fn a_part_of_a_block_is_its_beginning() {
    let model = load("micro", Mode::Native);
    let (state, _) = prefilled(&model, &random_ids(&model, 40, 8), 60);
    let block = model.draft(&state, 5).unwrap().unwrap();
    for count in 1..=block.ids.len() {
        let part = model.draft_tokens(&state, 5, count).unwrap().unwrap();
        assert_eq!((&part.ids[..], &part.confidence[..]), (&block.ids[..count], &block.confidence[..count]));
    }
}
