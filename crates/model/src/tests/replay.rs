//! Bounded replay, and states from entries alone.

use cpu::Cpu;

use super::*;
use crate::Waiting;

/// A prefill by bounded replay in steps of `chunk` tokens, and the logits after it.
fn replayed(model: &Model<Cpu>, ids: &[u32], chunk: usize, context: usize) -> (State<Cpu>, Vec<f32>) {
    let (mut state, mut waiting) = (model.new_state(context).unwrap(), Waiting::default());
    for chunk in ids.chunks(chunk) {
        model.encode(&mut state, &mut waiting, Input::text(chunk)).unwrap();
    }
    let out = model.decode(&mut state, waiting, Rows::Last).unwrap().unwrap();
    (state, model.backend().read(&out.logits).unwrap().as_f32().to_vec())
}

#[test]
fn bounded_replay_is_exact_up_to_a_window() {
    for name in MODELS {
        let model = load(name, Mode::Exact);
        let window = model.config().sliding_window;
        let ids = random_ids(&model, window, 1);
        for n in [1, 2, window / 2 + 1, window] {
            for chunk in [n, 5] {
                let (state, logits) = replayed(&model, &ids[..n], chunk, 64);
                let (full, want) = prefilled(&model, &ids[..n], 64);
                assert_eq!(bits(&logits), bits(&want), "{name}: {n} tokens");
                let (state, full) = (model.snapshot(&state).unwrap(), model.snapshot(&full).unwrap());
                assert!(state == full, "{name}: {n} tokens");
            }
        }
    }
}

#[test]
fn bounded_replay_does_not_depend_on_chunks_and_keeps_entries_exact() {
    for name in MODELS {
        for mode in MODES {
            let model = load(name, mode);
            let ids = random_ids(&model, 151, 2);
            let (one, logits) = replayed(&model, &ids, 151, 200);
            let (many, again) = replayed(&model, &ids, 7, 200);
            assert_eq!(bits(&logits), bits(&again), "{name} {mode:?}");
            assert!(model.snapshot(&one).unwrap() == model.snapshot(&many).unwrap(), "{name} {mode:?}");
            let (full, exact) = prefilled(&model, &ids, 200);
            assert_ne!(bits(&logits), bits(&exact), "{name} {mode:?}: nothing was left out");
            let entries = |s: &State<Cpu>| model.page(s, 0, 151).unwrap();
            assert!(entries(&one) == entries(&full), "{name} {mode:?}: entries come from the encoder alone");
        }
    }
}

/// Rows of the decoder are continued where it has been, as the windows are still there.
#[test]
fn a_short_continuation_of_a_replay_is_a_plain_step() {
    for name in MODELS {
        let model = load(name, Mode::Native);
        let ids = random_ids(&model, 90, 3);
        let (mut plain, _) = replayed(&model, &ids[..80], 80, 100);
        let mut state = plain.clone();
        let want = step(&model, &mut plain, &ids[80..]).pop().unwrap();
        let mut waiting = Waiting::default();
        model.encode(&mut state, &mut waiting, Input::text(&ids[80..85])).unwrap();
        model.encode(&mut state, &mut waiting, Input::text(&ids[85..])).unwrap();
        let out = model.decode(&mut state, waiting, Rows::Last).unwrap().unwrap();
        assert_eq!(bits(out.logits.as_f32()), bits(&want), "{name}");
        // Drafts after a replay can be taken back.
        let mut detour = state.clone();
        step(&model, &mut detour, &[&ids[..1], &random_ids(&model, model.slack(), 9)].concat());
        model.truncate(&mut detour, 91).unwrap();
        step(&model, &mut state, &ids[..1]);
        assert!(model.snapshot(&detour).unwrap() == model.snapshot(&state).unwrap(), "{name}");
    }
}

/// Entries of the first `len` tokens, as a prefix cache keeps them.
fn from_entries(model: &Model<Cpu>, full: &State<Cpu>, len: usize, context: usize) -> State<Cpu> {
    let mut state = model.new_state(context).unwrap();
    for first in (0..len).step_by(32) {
        let page = model.page(full, first, 32.min(full.len() - first)).unwrap();
        model.load_page(&mut state, &page, len).unwrap();
    }
    state
}

#[test]
fn a_cone_of_tokens_makes_exact_windows() {
    for name in MODELS {
        for mode in MODES {
            let model = load(name, mode);
            let n = model.cone() + 70;
            let ids = random_ids(&model, n, 4);
            let (full, _) = prefilled(&model, &ids, n);
            for len in [3, 40, model.cone() + 6, model.cone() + 33] {
                let mut state = from_entries(&model, &full, len, n);
                let from = len.saturating_sub(model.cone()) / 2 * 2;
                model.resume(&mut state, &ids[..from], true);
                for chunk in ids[from..len].chunks(50) {
                    model.forward(&mut state, Input::text(chunk), Rows::None, &mut Taps::off()).unwrap();
                }
                let (straight, _) = prefilled(&model, &ids[..len], n);
                let (got, want) = (model.snapshot(&state).unwrap(), model.snapshot(&straight).unwrap());
                assert!(got == want, "{name} {mode:?}: resumed at {len}");
            }
        }
    }
}

#[test]
fn a_window_of_tokens_alone_does_not_make_exact_windows() {
    let model = load("nano", Mode::Exact);
    let n = model.cone() + 40;
    let ids = random_ids(&model, n, 5);
    let (full, _) = prefilled(&model, &ids, n);
    let mut state = from_entries(&model, &full, n, n);
    let from = (n - model.config().sliding_window) / 2 * 2;
    model.resume(&mut state, &ids[..from], true);
    model.forward(&mut state, Input::text(&ids[from..]), Rows::None, &mut Taps::off()).unwrap();
    assert!(
        model.page(&state, 0, n).unwrap() == model.page(&full, 0, n).unwrap(),
        "entries stay as they were"
    );
    assert!(model.tail(&state).unwrap() != model.tail(&full).unwrap());
}

#[test]
fn a_bounded_resume_runs_one_window_and_writes_no_entry() {
    for name in MODELS {
        let model = load(name, Mode::Native);
        let window = model.config().sliding_window;
        let n = 4 * window + 10;
        let ids = random_ids(&model, n, 6);
        let (full, _) = prefilled(&model, &ids, n);
        for len in [window / 2 * 2, 2 * window, 3 * window + 2] {
            let mut state = from_entries(&model, &full, len, n);
            let from = (len - window) / 2 * 2;
            model.resume(&mut state, &ids[..from], false);
            let mut waiting = Waiting::default();
            model.encode(&mut state, &mut waiting, Input::text(&ids[from..len])).unwrap();
            assert!(model.page(&state, 0, len).unwrap() == model.page(&full, 0, len).unwrap(), "{name}");
            model.encode(&mut state, &mut waiting, Input::text(&ids[len..])).unwrap();
            let out = model.decode(&mut state, waiting, Rows::Last).unwrap().unwrap();
            assert!(out.logits.as_f32().iter().all(|l| l.is_finite()), "{name}");
            if from == 0 {
                let (want, _) = replayed(&model, &ids, n, n);
                assert!(
                    model.snapshot(&state).unwrap() == model.snapshot(&want).unwrap(),
                    "{name}: from the start"
                );
            }
        }
    }
}
