//! Sessions: going back, copies, bytes, kept states, refusals.

mod common;

use std::{ops::ControlFlow, sync::Arc};

use common::*;
use engine::{CacheOptions, Error, Loaded, Miss, Prefill, PrefixCache, Session, SessionOptions};
use ops::Mode;

/// Logits after `ids` on a session of its own, fed in one go.
fn straight(loaded: &Loaded, ids: &[u32]) -> Vec<u32> {
    let mut session = open(loaded, SessionOptions::new(ids.len()));
    feed(&mut *session, ids);
    bits(session.logits())
}

fn with_cache(loaded: &Loaded, context: usize, cache: &Arc<PrefixCache>) -> Box<dyn Session> {
    open(loaded, SessionOptions { cache: Some(cache.clone()), ..SessionOptions::new(context) })
}

fn new_cache(loaded: &Loaded, options: &CacheOptions) -> Arc<PrefixCache> {
    Arc::new(PrefixCache::open(options, &*loaded.lm, Prefill::Full).unwrap())
}

#[test]
fn a_session_goes_back_to_any_length() {
    for name in ["nano", "micro"] {
        let loaded = load(name, Mode::Native);
        let ids = random_ids(&loaded, 150, 1);
        let mut session = open(&loaded, SessionOptions::new(200));
        feed(&mut *session, &ids[..70]);
        session.mark().unwrap();
        feed(&mut *session, &ids[70..]);
        for len in [149, 147, 146, 100, 71, 70, 69, 3, 1] {
            session.truncate(len).unwrap();
            assert_eq!(session.ids(), &ids[..len]);
            assert_eq!(bits(session.logits()), straight(&loaded, &ids[..len]), "{name}: back to {len}");
            feed(&mut *session, &ids[len..]);
            assert_eq!(bits(session.logits()), straight(&loaded, &ids), "{name}: on from {len}");
        }
        session.truncate(0).unwrap();
        assert!(session.ids().is_empty() && session.logits().is_empty());
        feed(&mut *session, &ids[..20]);
        assert_eq!(bits(session.logits()), straight(&loaded, &ids[..20]), "{name}: anew");
    }
}

#[test]
fn copies_and_saved_sessions_continue_alike() {
    let loaded = load("micro", Mode::Source);
    let ids = random_ids(&loaded, 120, 2);
    let mut session = open(&loaded, SessionOptions::new(140));
    feed(&mut *session, &ids[..81]);
    let mut fork = session.fork().unwrap();
    assert_eq!(bits(fork.logits()), bits(session.logits()));
    let bytes = session.save().unwrap();
    feed(&mut *session, &random_ids(&loaded, 30, 3));
    // With more room than it had.
    let mut back = loaded.lm.clone().reopen(&bytes, SessionOptions::new(300)).unwrap();
    assert_eq!(back.ids(), &ids[..81]);
    for session in [&mut fork, &mut back] {
        feed(&mut **session, &ids[81..]);
        assert_eq!(bits(session.logits()), straight(&loaded, &ids));
    }
    assert!(fork.save().unwrap() == back.save().unwrap());
    let error = loaded.lm.clone().reopen(&bytes, SessionOptions::new(80)).err().unwrap();
    assert!(error.to_string().contains("81 tokens do not fit the context of 80"), "{error}");
    let other = load("micro", Mode::Exact);
    let error = other.lm.clone().reopen(&bytes, SessionOptions::new(140)).err().unwrap();
    assert!(error.to_string().contains("another model, numerics or device"), "{error}");
    let mut damaged = bytes.clone();
    damaged[bytes.len() / 2] ^= 1;
    let error = loaded.lm.clone().reopen(&damaged, SessionOptions::new(140)).err().unwrap();
    assert!(error.to_string().contains("checksum"), "{error}");
}

/// Prompts that share beginnings of every length: bit for bit what they are without a cache, from wherever they go on.
#[test]
fn kept_states_change_no_bit() {
    for (name, mode) in [("nano", Mode::Native), ("micro", Mode::Source)] {
        let loaded = load(name, mode);
        let mut random = Random(4);
        let base = random_ids(&loaded, if full() { 700 } else { 400 }, 5);
        // Little room, so that things are forgotten too; tails within a prompt.
        for memory in [1 << 30, 60_000] {
            let options = CacheOptions { memory, tail_every: 512, ..CacheOptions::default() };
            let cache = new_cache(&loaded, &options);
            let mut session = with_cache(&loaded, 800, &cache);
            let (mut kept, mut recomputed) = (0, 0);
            for n in 0..if full() { 150 } else { 10 } {
                if n % 5 == 4 {
                    session = with_cache(&loaded, 800, &cache);
                }
                let common = 1 + random.below(base.len() - 1);
                let more = 1 + random.below(60);
                let ids = [&base[..common], &random_ids(&loaded, more, random.next())].concat();
                let at = session.rewind(&ids).unwrap();
                let reuse = session.reuse();
                assert!(at < ids.len() && at == reuse.kept && session.ids() == &ids[..at]);
                (kept, recomputed) = (kept + reuse.kept, recomputed + reuse.recomputed);
                feed(&mut *session, &ids[at..]);
                let what = || format!("{name} {mode:?} {memory}: prompt {n}, {reuse:?}");
                assert_eq!(bits(session.logits()), straight(&loaded, &ids), "{}", what());
                if random.below(2) == 0 {
                    session.mark().unwrap();
                }
            }
            let stats = cache.stats();
            println!("{name} {mode:?}: {kept} kept, {recomputed} recomputed, {stats:?}");
            assert!(kept > 0 && recomputed > 0 && stats.memory_bytes <= memory);
            assert!(memory > 1 << 20 || stats.memory_evictions > 0);
        }
    }
}

#[test]
fn every_miss_is_explained() {
    let loaded = load("nano", Mode::Native);
    let ids = random_ids(&loaded, 300, 6);
    let cache = new_cache(&loaded, &CacheOptions::default());
    let reuse = |prompt: &[u32]| {
        let mut session = with_cache(&loaded, 400, &cache);
        session.rewind(prompt).unwrap();
        session.reuse()
    };
    assert_eq!(reuse(&ids).miss, Miss::Empty);
    let mut session = with_cache(&loaded, 400, &cache);
    feed(&mut *session, &ids[..200]);
    session.mark().unwrap();

    let longer = reuse(&ids);
    assert_eq!((longer.kept, longer.recomputed, longer.found), (199, 0, 199));
    assert_eq!(longer.miss, Miss::Ends { at: 199 });
    let again = reuse(&ids[..200]);
    assert_eq!((again.kept, again.recomputed, again.miss), (199, 0, Miss::None));
    for at in [0, 1, 63, 64, 65, 130, 191, 192, 195] {
        let mut other = ids[..260].to_vec();
        other[at] = (ids[at] + 1) % loaded.lm.config().vocab_size as u32;
        let got = reuse(&other);
        assert_eq!(got.miss, Miss::Differs { at, asked: other[at], kept: ids[at] }, "{got:?}");
        assert_eq!(got.found, at);
    }
    // A session's own tokens count as well.
    session.rewind(&[&ids[..150], &[1, 2, 3]].concat()).unwrap();
    assert_eq!(session.reuse().found, 150);

    // No room for anything: what was there is said to be gone.
    let cache = new_cache(&loaded, &CacheOptions { memory: 0, ..CacheOptions::default() });
    let mut session = with_cache(&loaded, 400, &cache);
    feed(&mut *session, &ids[..200]);
    session.mark().unwrap();
    let mut session = with_cache(&loaded, 400, &cache);
    session.rewind(&ids).unwrap();
    assert_eq!(session.reuse().miss, Miss::Evicted { at: 0 });
}

#[test]
fn a_stopped_prefill_leaves_a_session_that_works() {
    for prefill in [Prefill::Full, Prefill::Replay] {
        let loaded = load("nano", Mode::Native);
        let cache = Arc::new(PrefixCache::open(&CacheOptions::default(), &*loaded.lm, prefill).unwrap());
        let options = || SessionOptions { prefill, cache: Some(cache.clone()), ..SessionOptions::new(1024) };
        let ids = random_ids(&loaded, 1000, 7);
        let mut session = open(&loaded, options());
        let stopped = session.feed(&ids, &mut |_| ControlFlow::Break(())).unwrap();
        assert!(stopped.is_err() && session.logits().is_empty());
        assert_eq!(session.ids(), &ids[..512]);
        feed(&mut *session, &ids[512..600]);
        session.mark().unwrap();
        // From entries, stopped while windows are made anew.
        let mut second = open(&loaded, options());
        let other = [1; 430];
        let at = second.rewind(&[&ids[..590], &other].concat()).unwrap();
        assert!(at == 590 && second.reuse().recomputed > 0, "{:?}", second.reuse());
        let stopped = second.feed(&other, &mut |_| ControlFlow::Break(())).unwrap();
        assert!(stopped.is_err() == (prefill == Prefill::Full));
        let at = second.rewind(&ids[..600]).unwrap();
        feed(&mut *second, &ids[at..600]);
        if prefill == Prefill::Full {
            assert_eq!(bits(second.logits()), straight(&loaded, &ids[..600]));
        }
        assert_eq!(second.ids(), &ids[..600]);
    }
}

#[test]
fn what_does_not_fit_is_refused_before_any_work() {
    let loaded = load("nano", Mode::Native);
    let ids = random_ids(&loaded, 60, 8);
    let mut session = open(&loaded, SessionOptions::new(50));
    feed(&mut *session, &ids[..40]);
    let mut steps = 0;
    let error = session.feed(&ids[40..], &mut |_| {
        steps += 1;
        ControlFlow::Continue(())
    });
    let error = error.err().unwrap();
    assert!(matches!(error, Error::Model(model::Error::Context { need: 60, context: 50 })), "{error}");
    assert_eq!((steps, session.ids().len()), (0, 40));
    feed(&mut *session, &ids[40..50]);
    assert_eq!(bits(session.logits()), straight(&loaded, &ids[..50]), "the session is as it was");
    let prompt = engine::Prompt::from_ids(ids.clone(), greedy(), 5);
    let error = engine::answer(&loaded, &mut *session, &prompt, &mut |_| {}, &|| false).unwrap_err();
    assert!(matches!(error, Error::TooLong { prompt: 60, context: 50 }), "{error}");
    let error = loaded.lm.clone().session(1025).err().unwrap();
    assert!(error.to_string().contains("max_position_embeddings"), "{error}");
}

#[test]
fn bounded_replay_is_refused_where_it_must_not_be() {
    let loaded = load("nano", Mode::Source);
    let options = SessionOptions { prefill: Prefill::Replay, ..SessionOptions::new(50) };
    let error = loaded.lm.clone().open(options).err().unwrap();
    assert_eq!(error.exit_code(), 3, "{error}");
    // A cache of full states is not for replayed ones.
    let loaded = load("nano", Mode::Native);
    let cache = Some(new_cache(&loaded, &CacheOptions::default()));
    let options = SessionOptions { prefill: Prefill::Replay, cache, ..SessionOptions::new(50) };
    assert!(loaded.lm.clone().open(options).is_err());
}

/// An answer's tokens are kept at its end: the next turn goes on behind it.
#[test]
fn the_next_turn_goes_on_behind_the_answer() {
    let loaded = load("nano", Mode::Native);
    let cache = new_cache(&loaded, &CacheOptions::default());
    let ids = random_ids(&loaded, 100, 9);
    let mut session = with_cache(&loaded, 400, &cache);
    let first = answer(&loaded, &mut *session, &ids, greedy(), 20);
    let next = [ids.as_slice(), &first.ids, &random_ids(&loaded, 9, 10)].concat();
    let mut other = with_cache(&loaded, 400, &cache);
    let second = answer(&loaded, &mut *other, &next, greedy(), 10);
    assert_eq!(second.usage.cached_tokens, 118, "{:?}", second.reuse);
    let mut alone = open(&loaded, SessionOptions::new(400));
    assert_eq!(second.ids, answer(&loaded, &mut *alone, &next, greedy(), 10).ids);
}
