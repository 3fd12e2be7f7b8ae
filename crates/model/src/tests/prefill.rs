//! Prefills without the rows that nothing reads.

use cpu::Cpu;

use super::*;

/// Takes `ids` to `end` tokens in steps of `chunk`; the logits after the last where these are all.
fn prefill(model: &Model<Cpu>, state: &mut State<Cpu>, ids: &[u32], end: usize, chunk: usize) -> Vec<f32> {
    let mut logits = Vec::new();
    for ids in ids.chunks(chunk) {
        let rows = if state.len() + ids.len() == end { Rows::Last } else { Rows::None };
        if let Some(out) = model.prefill(state, Input::text(ids), end, rows).unwrap() {
            logits = model.backend().read(&out.logits).unwrap().as_f32().to_vec();
        }
    }
    logits
}

/// Equal bytes now, equal drafts, and equal bits after as many tokens were taken back as can be and others came.
fn assert_same(model: &Model<Cpu>, got: &State<Cpu>, want: &State<Cpu>, what: &str) {
    let (mut got, mut want) = (got.clone(), want.clone());
    assert!(model.snapshot(&got).unwrap() == model.snapshot(&want).unwrap(), "{what}: bytes");
    let draft = |s: &State<Cpu>| model.draft(s, 5).unwrap().map(|d| (d.ids, bits(d.logits.as_f32())));
    assert_eq!(draft(&got), draft(&want), "{what}: drafts");
    let back = got.oldest();
    assert_eq!(back, want.oldest(), "{what}: tokens that can be taken back");
    for state in [&mut got, &mut want] {
        model.truncate(state, back).unwrap();
    }
    let ids = random_ids(model, 9, 77);
    let rows = |s: &mut State<Cpu>| step(model, s, &ids).iter().map(|r| bits(r)).collect::<Vec<_>>();
    assert!(rows(&mut got) == rows(&mut want), "{what}: after taking back");
    assert!(model.snapshot(&got).unwrap() == model.snapshot(&want).unwrap(), "{what}: bytes after that");
}

#[test]
fn a_prefill_without_unread_rows_leaves_the_same_state() {
    for name in MODELS {
        for mode in MODES {
            let model = load(name, mode);
            let n = model.cone() + 71;
            let ids = random_ids(&model, n, 11);
            let (want, logits) = prefilled(&model, &ids, n + 20);
            for chunk in [n, 64, 7] {
                let mut got = model.new_state(n + 20).unwrap();
                let last = prefill(&model, &mut got, &ids, n, chunk);
                assert_eq!(bits(&last), bits(&logits), "{name} {mode:?} in steps of {chunk}");
                assert_same(&model, &got, &want, &format!("{name} {mode:?} in steps of {chunk}"));
            }
        }
    }
}

#[test]
fn prefills_follow_each_other() {
    for name in MODELS {
        let model = load(name, Mode::Native);
        let n = 2 * model.cone();
        let ids = random_ids(&model, n, 12);
        let (want, logits) = prefilled(&model, &ids, n + 20);
        for ends in [vec![1, n], vec![33, 34, n], vec![model.cone() + 5, model.cone() + 60, n]] {
            let mut got = model.new_state(n + 20).unwrap();
            let mut last = Vec::new();
            for end in &ends {
                let from = got.len();
                last = prefill(&model, &mut got, &ids[from..*end], *end, 50);
            }
            assert_eq!(bits(&last), bits(&logits), "{name} {ends:?}");
            assert_same(&model, &got, &want, &format!("{name} {ends:?}"));
        }
    }
}

#[test]
fn a_prefill_goes_on_from_entries() {
    for name in MODELS {
        for mode in MODES {
            let model = load(name, mode);
            let n = model.cone() + 140;
            let ids = random_ids(&model, n, 13);
            let (want, logits) = prefilled(&model, &ids, n + 20);
            for entries in [3, 40, model.cone() + 7, n - 40, n - 1] {
                let mut got = model.new_state(n + 20).unwrap();
                let page = model.page(&want, 0, n).unwrap();
                model.load_page(&mut got, &page, entries).unwrap();
                let from = entries.saturating_sub(model.cone()) / 2 * 2;
                model.resume(&mut got, &ids[..from], true);
                let last = prefill(&model, &mut got, &ids[from..], n, 64);
                assert_eq!(bits(&last), bits(&logits), "{name} {mode:?} from {entries} entries");
                let (a, b) = (model.snapshot(&got).unwrap(), model.snapshot(&want).unwrap());
                assert!(a == b, "{name} {mode:?} from {entries} entries");
            }
        }
    }
}

#[test]
fn behind_the_last_source_a_layer_takes_a_window_more_than_the_next() {
    for name in MODELS {
        let model = load(name, Mode::Exact);
        let (window, n) = (model.config().sliding_window, 2 * model.cone());
        let lows = model.lows(0, n, 0);
        let last = lows.len() - 1;
        assert_eq!(lows[last], (n - window - model.slack()) / 2 * 2, "{name}");
        let decoder = model.config().candidate_source_layer_id;
        for l in decoder..last {
            let more = lows[l + 1] - lows[l];
            assert!((window - 1..=window + 1).contains(&more), "{name}: layer {l} takes {more} more");
        }
        assert!(lows[..decoder].iter().all(|low| *low == 0), "{name}: entries need all of {lows:?}");
    }
}

#[test]
fn a_row_that_is_read_must_not_be_left_out() {
    let model = load("micro", Mode::Exact);
    let n = model.cone() + 70;
    let ids = random_ids(&model, n, 14);
    let (want, _) = prefilled(&model, &ids, n);
    let last = model.config().num_hidden_layers - 1;
    for (layer, more) in [(last, 6 + model.slack()), (last - 1, 6 + model.slack())] {
        let mut got = model.new_state(n).unwrap();
        let mut walk = model.start(&mut got, Input::text(&ids)).unwrap();
        walk.lows = model.lows(0, n, 0);
        for low in &mut walk.lows[layer..] {
            *low += more;
        }
        while model.advance(&mut walk, &mut got, &mut Taps::off()).unwrap() {}
        model.finish(walk, &mut got, Rows::None, &mut Taps::off()).unwrap();
        let (got, want) = (model.tail(&got).unwrap(), model.tail(&want).unwrap());
        assert!(got != want, "layer {layer} without {more} rows");
    }
}
