//! Ids of tool calls (spec section 6.6).

use xxhash_rust::xxh3::xxh3_64;

const ALPHABET: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";

/// A new id for the call number `index` of an answer; `empty_thinking` marks a thinking turn without reasoning, so that
/// a later request may leave the reasoning out.
pub fn new_call_id(index: usize, empty_thinking: bool) -> String {
    let mut random = String::with_capacity(20);
    while random.len() < 20 {
        let mut bytes = [0u8; 32];
        if getrandom::fill(&mut bytes).is_err() {
            // Without a source of entropy ids are still distinct in time.
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            bytes[..16].copy_from_slice(&(now.as_nanos() + random.len() as u128).to_le_bytes());
        }
        // 248 is the largest multiple of 62 that a byte holds: every letter is equally likely.
        let letters = bytes.iter().filter(|&&b| b < 248).map(|&b| char::from(ALPHABET[b as usize % 62]));
        random.extend(letters.take(20 - random.len()));
    }
    with_checksum(format!("call_{index:02}_{}{random}", if empty_thinking { "ET_" } else { "" }))
}

/// Appends four digits: XXH3-64 of everything but the underscores, modulo 10000.
fn with_checksum(id: String) -> String {
    let hash = xxh3_64(id.replace('_', "").as_bytes()) % 10_000;
    format!("{id}{hash:04}")
}

/// Whether an id of a request says that the turn's missing reasoning is right.
pub(crate) fn marks_empty_thinking(id: &str) -> bool {
    id.is_ascii() && (id.get(8..11) == Some("ET_") || id.get(6..8) == Some("ET"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn form_of_an_id() {
        for (index, empty, length) in [(0, false, 32), (3, true, 35), (12, false, 32), (123, true, 36)] {
            let id = new_call_id(index, empty);
            assert_eq!(id.len(), length, "{id}");
            assert!(id.starts_with(&format!("call_{index:02}_{}", if empty { "ET_" } else { "" })));
            assert_eq!(with_checksum(id[..id.len() - 4].to_owned()), id);
            assert!(id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_'));
        }
        assert!(marks_empty_thinking(&new_call_id(0, true)) && !marks_empty_thinking(&new_call_id(0, false)));
        assert!(marks_empty_thinking("call00ETabc") && !marks_empty_thinking("toolu_123é"));
        assert_ne!(new_call_id(0, false), new_call_id(0, false));
        // The published algorithm on a fixed input: XXH3-64 with seed 0.
        assert_eq!(xxh3_64(b""), 0x2d06_8005_38d3_94c2);
    }
}
