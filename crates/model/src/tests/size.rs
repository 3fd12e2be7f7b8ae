//! Bytes of a state at the released geometry [§6.3].

use checkpoint::Config;

use super::root;
use crate::Layout;

fn released() -> Config {
    Config::load_file(&root().join("fixtures/released/config.json")).unwrap()
}

#[test]
fn a_token_takes_890_bytes() {
    let layout = Layout::of(&released(), true);
    assert_eq!((layout.kv_row, layout.key_row, layout.ring_row), (288, 68, 528));
    assert_eq!(layout.entry_bytes(0, 2), 2 * 890);
    for n in [0, 1, 2, 3, 4095, 4096, 1 << 20] {
        assert_eq!(layout.entry_bytes(0, n), (3 * (n / 2) + n) * 356, "{n} tokens");
    }
    assert_eq!(layout.entry_bytes(0, 1 << 20), 933_232_640);
    assert_eq!(layout.entry_bytes(64, 64) + layout.entry_bytes(0, 64), layout.entry_bytes(0, 128));
}

#[test]
fn windows_take_the_same_at_any_length() {
    let (bare, layout) = (Layout::of(&released(), false), Layout::of(&released(), true));
    assert_eq!(bare.window_bytes(128), 2_703_360);
    assert_eq!(layout.window_bytes(1 << 20), 2_703_360 + 202_752);
    assert_eq!(layout.window_bytes(1), 43 * 528);
    // A kept state has one open token a source; the other of the two that §6.3 counts is there within a step only.
    assert_eq!((layout.group_bytes(), layout.open_bytes()), (24_576, 24_576 / 2));
    assert_eq!(bare.state_bytes(1 << 20), (890 << 20) + 2_703_360 + 24_576);
}
