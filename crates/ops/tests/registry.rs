//! What holds for every registered operator.

use std::collections::HashSet;

use ops::{
    Mode, Reference,
    registry::{self, Geometry, SPECS},
};

#[test]
fn names_are_unique_and_entries_are_complete() {
    let names: HashSet<_> = SPECS.iter().map(|s| s.name).collect();
    assert_eq!(names.len(), SPECS.len());
    for s in SPECS {
        assert!(s.contract.contains("->"), "{}: the contract names inputs and outputs", s.name);
        assert!(!s.exact.reason.is_empty() && !s.source.reason.is_empty(), "{}: reasons", s.name);
        assert!(s.source.nrms >= s.exact.nrms, "{}: source rounds more often than exact", s.name);
    }
    assert!(registry::case("no such operator", &Geometry::TINY, 1, 1).is_none());
}

#[test]
fn the_reference_repeats_bit_for_bit_and_gives_finite_values() {
    for mode in [Mode::Exact, Mode::Source] {
        let b = Reference::new(mode);
        for s in SPECS {
            let c = registry::case(s.name, &Geometry::TINY, 5, 7).unwrap();
            let first = registry::run(s.name, &b, &c).unwrap().unwrap();
            let second = registry::run(s.name, &b, &c).unwrap().unwrap();
            assert!(registry::compare(&first, &second).iter().all(|c| c.equal), "{}", s.name);
            for (name, host) in &first {
                if let ops::Data::F32(v) = host.data() {
                    assert!(v.iter().all(|v| !v.is_nan()), "{} {name}", s.name);
                    assert!(v.iter().any(|v| *v != 0.0), "{} {name} is all zero", s.name);
                }
            }
        }
    }
}

#[test]
fn a_row_of_the_reference_does_not_depend_on_the_others() {
    for mode in [Mode::Exact, Mode::Source] {
        for s in SPECS {
            for rows in [2, 9] {
                let differing =
                    registry::row_variance(s.name, &Reference::new(mode), &Geometry::TINY, rows, 3);
                assert_eq!(differing.unwrap(), [], "{} {rows} rows {}", s.name, mode.name());
            }
        }
    }
}

#[test]
fn source_departs_from_exact_only_where_it_rounds() {
    // An operator whose two modes agree to the bit rounds nothing; those listed here are the ones that must.
    let rounds =
        ["rmsnorm", "linear_fp8", "linear_bf16", "grouped_linear", "rope", "pool_pairs", "index_scores"];
    let rounds = rounds.into_iter().chain(["sparse_attention", "routed_experts", "shared_expert", "moe_sum"]);
    let rounds = rounds.chain(["linear_exl3", "grouped_linear_exl3", "experts_exl3"]);
    let rounds: HashSet<_> =
        rounds.chain(["hc_collapse", "hc_expand", "engram_gate", "stream_mean", "draft_attention"]).collect();
    for s in SPECS {
        let c = registry::case(s.name, &Geometry::TINY, 3, 11).unwrap();
        let exact = registry::run(s.name, &Reference::new(Mode::Exact), &c).unwrap().unwrap();
        let source = registry::run(s.name, &Reference::new(Mode::Source), &c).unwrap().unwrap();
        let equal = registry::compare(&source, &exact).iter().all(|c| c.equal);
        assert_eq!(!equal, rounds.contains(s.name), "{}", s.name);
    }
}
