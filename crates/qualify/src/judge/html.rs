//! The judgement as one self-contained page: a heat map layer x tensor and the error along the text.

use crate::judge::Judgement;

const PAGE: &str = include_str!("page.html");

/// The page. The judgement lies in it as JSON; nothing is fetched.
pub fn page(judgement: &Judgement) -> String {
    let json = serde_json::to_string(judgement).expect("a judgement is plain data");
    // `</script>` in a name must not end the element.
    PAGE.replace("\"JUDGEMENT\"", &json.replace('<', "\\u003c"))
}
