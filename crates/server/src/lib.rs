//! HTTP over one engine: OpenAI chat completions, completions and responses, Anthropic messages, a web page.
//!
//! ```text
//! connection ─► read, check ─► queue ─► worker (Engine) ─► updates ─► Wire ─► connection
//! ```
//! Requests wait in a fair, bounded queue ([`Queue`]); one worker thread owns the [`Engine`] and computes one request at a
//! time. A client that goes away, a deadline and the server's end stop an answer within one step. Nothing that a client
//! says is logged.

#![forbid(unsafe_code)]

mod completion;
pub mod fields;
mod http;
mod metrics;
mod page;
mod replay;
mod wire;
mod worker;

use std::{future::Future, io, sync::Arc, time::Duration};

pub use http::{Settings, router};
pub use metrics::Metrics;
use text::Tokenizer;
use tokio::net::TcpListener;
pub use worker::{Engine, Failure, Job, NotTaken, Queue, SessionEngine, TokenLog, Update, start};

/// Serves until `shutdown`: then no request is taken, those that wait are told so, and a running answer has `grace` to end.
///
/// # Errors
/// No thread, a connection that cannot be listened on, bad settings.
pub async fn serve(
    listener: TcpListener,
    settings: Settings,
    tokenizer: Arc<Tokenizer>,
    engine: impl Engine,
    max_queue: usize,
    grace: Duration,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let metrics = Arc::new(Metrics::new().map_err(io::Error::other)?);
    let queue = Arc::new(Queue::new(max_queue));
    let router = router(settings, tokenizer, queue.clone(), metrics.clone()).map_err(io::Error::other)?;
    let worker = start(engine, queue.clone(), metrics)?;
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let ending = queue.clone();
    tokio::spawn(async move {
        shutdown.await;
        ending.end();
        let _ = stop.send(true);
        tokio::time::sleep(grace).await;
        ending.abort();
    });
    let mut first = stopped.clone();
    let mut last = stopped;
    let serving = axum::serve(listener, router).with_graceful_shutdown(async move {
        let _ = first.wait_for(|stop| *stop).await;
    });
    let given_up = async move {
        let _ = last.wait_for(|stop| *stop).await;
        // Clients that do not read their answer do not hold the server up.
        tokio::time::sleep(grace + Duration::from_secs(5)).await;
    };
    let result = tokio::select! {
        result = serving => result,
        () = given_up => Ok(()),
    };
    queue.end();
    queue.abort();
    let _ = tokio::task::spawn_blocking(move || worker.join()).await;
    result
}
