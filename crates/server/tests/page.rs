//! The web page: its files, its policy, and who may see what.

mod common;

use common::{request, scripted, settings};
use serde_json::json;
use server::Settings;

#[test]
fn the_page_comes_with_a_strict_policy_and_needs_no_key() {
    let server = scripted(Settings { api_keys: vec!["secret".into()], ..settings() }, 4);
    for (path, kind) in [
        ("/", "text/html"),
        ("/web/app.js", "text/javascript"),
        ("/web/style.css", "text/css"),
        ("/web/icon.svg", "image/svg+xml"),
    ] {
        let reply = request(server.address, "GET", path, "", b"");
        assert_eq!(reply.status, 200, "{path}");
        assert!(reply.head.contains(&format!("content-type: {kind}")), "{path}: {}", reply.head);
        let policy = reply.head.lines().find(|l| l.starts_with("content-security-policy: ")).unwrap();
        assert!(policy.contains("default-src 'none'") && policy.contains("script-src 'self'"), "{policy}");
        assert!(!policy.contains("unsafe") && !policy.contains('*'), "{policy}");
        assert!(reply.head.contains("x-content-type-options: nosniff"), "{}", reply.head);
    }
    assert_eq!(request(server.address, "GET", "/web/nothing.js", "", b"").status, 404);
    assert_eq!(request(server.address, "POST", "/", "", b"").status, 405);
}

#[test]
fn what_the_server_says_of_itself_needs_the_key() {
    let page = json!({"qualification": {"receipts": []}, "suggestions": ["Hello!"]});
    let server = scripted(Settings { api_keys: vec!["secret".into()], page, ..settings() }, 4);
    assert_eq!(request(server.address, "GET", "/web/server.json", "", b"").status, 401);
    let reply = request(server.address, "GET", "/web/server.json", "Authorization: Bearer secret\r\n", b"");
    assert_eq!(reply.status, 200);
    let about = reply.json();
    assert_eq!(about["model"], "DeepSeek-V4.1-Flash");
    assert_eq!(about["max_queue"], 4);
    assert_eq!(about["suggestions"][0], "Hello!");
    assert!(about["qualification"]["receipts"].is_array(), "{about}");
}
