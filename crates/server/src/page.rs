//! The web page: a few static files inside the program, and what the server says about itself.
//!
//! The page loads nothing from elsewhere and runs no script but its own: the policy below forbids both, and forbids
//! reading text as HTML where the browser knows how.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Path, State},
    http::{HeaderName, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use crate::http::{App, refuse};

const HTML: &str = "text/html; charset=utf-8";
const JS: &str = "text/javascript; charset=utf-8";

/// Files of the page, with their types.
const FILES: [(&str, &str, &str); 11] = [
    ("index.html", HTML, include_str!("../web/index.html")),
    ("style.css", "text/css; charset=utf-8", include_str!("../web/style.css")),
    ("icon.svg", "image/svg+xml", include_str!("../web/icon.svg")),
    ("app.js", JS, include_str!("../web/app.js")),
    ("api.js", JS, include_str!("../web/api.js")),
    ("chat.js", JS, include_str!("../web/chat.js")),
    ("dom.js", JS, include_str!("../web/dom.js")),
    ("markdown.js", JS, include_str!("../web/markdown.js")),
    ("qualification.js", JS, include_str!("../web/qualification.js")),
    ("settings.js", JS, include_str!("../web/settings.js")),
    ("status.js", JS, include_str!("../web/status.js")),
];

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// The page itself.
pub(crate) async fn index() -> Response {
    file(Path("index.html".into())).await
}

/// A file of the page.
pub(crate) async fn file(Path(name): Path<String>) -> Response {
    let Some((_, kind, text)) = FILES.iter().find(|(file, ..)| *file == name) else {
        return refuse(404, &format!("there is no /web/{name}"), false);
    };
    let headers = [
        (header::CONTENT_TYPE, *kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        // Another version of the program may stand behind the same address tomorrow.
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (StatusCode::OK, headers, *text).into_response()
}

/// What the page shows beside conversations and figures.
pub(crate) async fn about(State(app): State<Arc<App>>) -> Response {
    let settings = &app.settings;
    let mut about = json!({
        "model": settings.model,
        "context": settings.context,
        "fingerprint": settings.fingerprint,
        "max_queue": app.queue.limit(),
    });
    if let (Some(about), Value::Object(more)) = (about.as_object_mut(), &settings.page) {
        about.extend(more.clone());
    }
    Json(about).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_small_and_whole() {
        let size: usize = FILES.iter().map(|(.., text)| text.len()).sum();
        assert!(size < 60_000, "the page has {size} bytes");
        // Every file that another one names is there.
        for (name, _, text) in FILES {
            for end in [".js\"", ".css\"", ".svg\""] {
                for (at, _) in text.match_indices(end) {
                    let before = &text[..at + end.len() - 1];
                    let named = before.rsplit(['"', '/']).next().unwrap();
                    assert!(FILES.iter().any(|(file, ..)| *file == named), "{name} names {named}");
                }
            }
        }
    }

    #[test]
    fn the_page_asks_nobody_else_and_makes_no_html_of_text() {
        for (name, _, text) in FILES {
            let text = text.replace("http://www.w3.org/2000/svg", ""); // a name, which nobody fetches
            for bad in [
                "http:",
                "https:",
                "//cdn",
                "innerHTML",
                "outerHTML",
                "insertAdjacent",
                "eval(",
                "document.write",
                " style=",
                "onclick=\"",
            ] {
                assert!(!text.contains(bad), "{name} has {bad}");
            }
        }
    }
}
