//! A conversation that could not be finished is refused before it begins. The limit is the process's, so that this file has
//! one test.

mod common;

use common::*;
use engine::{Error, SessionOptions, memory, plan};
use ops::Mode;

#[test]
fn what_cannot_finish_is_refused_before_it_begins() {
    let loaded = load("nano", Mode::Native);
    let config = loaded.lm.config().clone();
    let state = plan::state_bytes(&loaded.lm.layout(), 64);
    let step = plan::Plan::new(
        &config,
        plan::Parts::default(),
        plan::Wish { context: 64, drafts: false },
        &[],
        false,
    )
    .transient;
    memory::set_limit(2 * state + step);
    let ids = random_ids(&loaded, 60, 1);
    let mut a = loaded.lm.clone().open(SessionOptions::new(64)).unwrap();
    let b = a.fork().unwrap();
    // Two are there; a third, or one longer conversation, would exceed what is left.
    let e = loaded.lm.clone().open(SessionOptions::new(64)).err().unwrap();
    assert!(matches!(e, Error::Memory { need, free } if need == state + step && free == step), "{e}");
    assert_eq!(e.exit_code(), 5);
    assert!(e.to_string().contains("--context"), "{e}");
    // Those that are there go on to their end.
    feed(&mut *a, &ids);
    drop(b);
    let mut c = loaded.lm.clone().open(SessionOptions::new(64)).unwrap();
    feed(&mut *c, &ids);
    assert_eq!(bits(a.logits()), bits(c.logits()));
    drop((a, c));
    assert!(matches!(loaded.lm.clone().open(SessionOptions::new(1 << 11)).err(), Some(Error::Memory { .. })));
}
