//! How many prompt tokens an image takes (spec section 3.5), and which image references are acceptable.

use base64::Engine;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

const PATCH: u64 = 14;
const CELL: u64 = 3 * PATCH;
const LARGEST_BLOCK: u64 = 1024;
const SMALLEST_AREA: u64 = 544 * 544;
/// Largest side accepted, so that areas stay far from overflow.
const LARGEST_SIDE: u64 = 1 << 20;

/// Length of the token block of an image of `width` x `height` pixels; nothing for a size without area, above
/// 2^20 a side, or one whose fitting does not settle.
pub fn image_tokens(width: u64, height: u64) -> Option<u64> {
    if width == 0 || height == 0 || width > LARGEST_SIDE || height > LARGEST_SIDE {
        return None;
    }
    let mut fitted = fit(width, height);
    for _ in 1..10 {
        let again = fit(fitted.width, fitted.height);
        if again == fitted {
            return Some(fitted.tokens);
        }
        fitted = again;
    }
    None
}

#[derive(PartialEq)]
struct Fitted {
    width: u64,
    height: u64,
    tokens: u64,
}

/// A size in pixels that is a multiple of the patch, with its block length: a newline per row, a start and an end.
fn block(width: u64, height: u64) -> Fitted {
    let cells = |side: u64| (side / PATCH).div_ceil(3);
    Fitted { width, height, tokens: cells(height) * (cells(width) + 1) + 2 }
}

fn fit(mut width: u64, mut height: u64) -> Fitted {
    let area = width * height;
    if (1..SMALLEST_AREA).contains(&area) {
        let ratio = (SMALLEST_AREA as f64 / area as f64).sqrt();
        width = (width as f64 * ratio) as u64;
        height = (height as f64 * ratio) as u64;
    }
    let aligned = block(width.div_ceil(PATCH) * PATCH, height.div_ceil(PATCH) * PATCH);
    if aligned.tokens <= LARGEST_BLOCK {
        return aligned;
    }
    let room = LARGEST_BLOCK - 2;
    let (w, h) = (width as f64, height as f64);
    let columns = (room as f64 / (h / w) + 0.25).sqrt() - 0.5;
    let rows = columns * (h / w);
    if columns < 1.0 {
        block(CELL, room / 2 * CELL)
    } else if rows < 1.0 {
        block((room - 1) * CELL, CELL)
    } else {
        let scale = (columns.trunc() * CELL as f64 / w).min(rows.trunc() * CELL as f64 / h);
        let side = |side: f64| (side * scale / PATCH as f64) as u64 * PATCH;
        block(side(w), side(h))
    }
}

const LONGEST_LINK: usize = 8192;
const MEDIA_TYPES: [&str; 5] = ["image/jpeg", "image/jpg", "image/png", "image/gif", "image/webp"];

/// Checks an `http(s)` link or a base64 `data:` URL; the error says what is wrong with it.
pub(crate) fn check_url(url: &str) -> Result<(), String> {
    if url.get(..4).is_some_and(|scheme| scheme.eq_ignore_ascii_case("http")) {
        if url.len() > LONGEST_LINK {
            return Err(format!(
                "the image link has {} bytes, at most {LONGEST_LINK} are accepted; send the image as a data URL",
                url.len()
            ));
        }
        return Ok(());
    }
    let parts = url.strip_prefix("data:").and_then(|rest| rest.split_once(','));
    let Some((media, body)) = parts.and_then(|(head, body)| Some((head.strip_suffix(";base64")?, body)))
    else {
        return Err("an image must be an http(s) link or a data URL with base64".into());
    };
    let media = media.split(';').next().unwrap_or_default();
    if !MEDIA_TYPES.iter().any(|known| media.eq_ignore_ascii_case(known)) {
        return Err(format!("image type {media:?} is not supported; use jpeg, png, gif or webp"));
    }
    check_base64(body)
}

/// Checks the media type and body of an inline image and makes a `data:` URL of it.
pub(crate) fn data_url(media: &str, body: &str) -> Result<String, String> {
    let url = format!("data:{media};base64,{body}");
    check_url(&url).map(|()| url)
}

fn check_base64(body: &str) -> Result<(), String> {
    let engine = GeneralPurpose::new(
        &base64::alphabet::STANDARD,
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
    );
    let compact: String = body.chars().filter(|c| !c.is_ascii_whitespace()).collect();
    match engine.decode(compact.as_bytes()) {
        Ok(bytes) if !bytes.is_empty() => Ok(()),
        Ok(_) => Err("the image is empty".into()),
        Err(e) => Err(format!("the image is not valid base64: {e}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_the_fixture() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/encoding/image_tokens.jsonl");
        let text = std::fs::read_to_string(path).unwrap();
        for line in text.lines() {
            let case: serde_json::Value = serde_json::from_str(line).unwrap();
            let side = |name: &str| case[name].as_u64().unwrap();
            assert_eq!(image_tokens(side("width"), side("height")), Some(side("tokens")), "{line}");
        }
        assert_eq!(text.lines().count(), 35);
        assert_eq!(image_tokens(0, 5), None);
        assert_eq!(image_tokens(u64::MAX, 5), None);
        for side in [1, 7, 544, LARGEST_SIDE] {
            assert!(image_tokens(1, side).is_none_or(|n| n <= LARGEST_BLOCK));
            assert!(image_tokens(side, 1).is_none_or(|n| n <= LARGEST_BLOCK));
        }
    }

    #[test]
    fn references() {
        for good in
            ["https://x/y.png", "HTTP://x", "data:image/png;base64,AAAA", "data:image/webp;base64,AA A"]
        {
            assert_eq!(check_url(good), Ok(()), "{good}");
        }
        for bad in
            ["", "ftp://x", "data:image/bmp;base64,AAAA", "data:image/png,AAAA", "data:image/png;base64,A*"]
        {
            assert!(check_url(bad).is_err(), "{bad}");
        }
        assert!(check_url(&format!("https://{}", "x".repeat(LONGEST_LINK))).is_err());
    }
}
