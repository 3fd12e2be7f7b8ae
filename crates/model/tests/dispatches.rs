//! How many dispatches a layer takes in a decode step.

mod common;

use std::collections::HashMap;

use checkpoint::Role;
use common::{Golden, emu, load, step};
use model::{Input, Rows};
use ops::{Mode, Taps};

/// Most dispatches of a layer by its role, and what Engram adds.
fn most(role: Role) -> u64 {
    match role {
        Role::Window | Role::Reuse => 14,
        Role::Full => 22,
        Role::Reindex => 18,
    }
}
const ENGRAM: u64 = 2;
/// What a layer adds whose input the drafts read.
const FEATURE: u64 = 1;
/// Each layer alone; and in a whole step, the next layer's first launch takes in what a layer leaves, unless something else reads
/// it first.
#[test]
fn a_decode_step_takes_few_dispatches() {
    let ids = Golden::open("nano/golden/float32.safetensors").tokens("decode");
    let model = load("nano", emu(Mode::Native));
    let (b, c) = (model.backend(), model.config());
    let mut state = model.new_state(ids.len()).unwrap();
    let (before, rest) = ids.split_at(ids.len() - 8);
    step(&model, &mut state, Input::text(before));
    let total = |counts: &HashMap<&str, u64>| counts.values().sum::<u64>();
    let more = |l: usize| {
        let adds = |ids: &[usize], n: u64| if ids.contains(&l) { n } else { 0 };
        adds(&c.engram.layer_ids, ENGRAM) + adds(&c.dspark.target_layer_ids, FEATURE)
    };
    let layers = 0..c.num_hidden_layers;
    for id in &rest[..4] {
        let mut walk = model.start(&mut state, Input::text(&[*id])).unwrap();
        for l in layers.clone() {
            let counts = b.counted(|| {
                model.advance(&mut walk, &mut state, &mut Taps::off()).unwrap();
            });
            // Nobody takes this layer's result in while it is counted alone.
            let own = total(&counts) - counts["hc_expand"];
            let bar = most(c.layer(l).role) + more(l);
            assert!(
                own <= bar,
                "layer {l}, {:?}: {own} dispatches, {bar} at most: {counts:?}",
                c.layer(l).role
            );
        }
        model.finish(walk, &mut state, Rows::Last, &mut Taps::off()).unwrap();
    }
    for id in &rest[4..] {
        let counts = b.counted(|| {
            model.forward(&mut state, Input::text(&[*id]), Rows::Last, &mut Taps::off()).unwrap();
        });
        // Engram, the drafts and the head read the streams themselves.
        let readers = layers.clone().filter(|l| more(*l) > 0).count() as u64 + 1;
        assert_eq!(counts["hc_expand"], readers, "{counts:?}");
    }
}
