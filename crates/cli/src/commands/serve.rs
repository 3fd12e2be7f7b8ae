//! `hallmark serve`.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use server::{Engine, SessionEngine, Settings};

use crate::{
    args::{SamplingMode, Serve},
    commands::serve_page,
    failure::Failure,
};

/// Nobody hears the first step.
struct Silent;

impl engine::Watch for Silent {}

pub fn run(args: &Serve) -> Result<(), Failure> {
    let keys = args.keys()?;
    let address = SocketAddr::new(args.host, args.port);
    let judgement = args.judgement.as_deref().map(serve_page::judgement).transpose()?;
    let (loaded, standing) = args.admission.load(&args.model)?;
    let longest = loaded.lm.config().max_position_embeddings;
    let context = args.context.unwrap_or(longest.min(65_536));
    let session = args.sessions.open(&loaded, context)?;
    let config = loaded.lm.config();
    let mut engine = SessionEngine { tokenizer: loaded.tokenizer.clone(), eos: config.eos_token_id, session };
    // One step before the door opens: a device that fails says so now.
    let first = engine::Prompt::from_ids(vec![config.bos_token_id], text::SamplingParams::default(), 1);
    engine.answer(&first, &mut Silent)?;
    let settings = Settings {
        fingerprint: format!(
            "hallmark-{}-{}-{}",
            env!("CARGO_PKG_VERSION"),
            loaded.lm.device(),
            loaded.lm.mode().name()
        ),
        api_keys: keys,
        deadline: Duration::from_secs(args.deadline),
        max_body: usize::try_from(args.max_body).unwrap_or(usize::MAX),
        official_sampling: args.sampling == SamplingMode::Official,
        cors: args.cors.clone(),
        page: serve_page::page(args, &loaded, &standing, judgement)?,
        replay: args.replay,
        ..Settings::new(args.served_name.clone(), context)
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        // Requests are read on threads of their own; one that writes what the engine says wakes no other.
        .worker_threads(1)
        .enable_all()
        .build()
        .map_err(|e| Failure::Io(format!("starting the server: {e}")))?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind(address)
            .await
            .map_err(|e| Failure::Io(format!("{address}: {e}; choose another --host or --port")))?;
        let bound = listener.local_addr().map_err(|e| Failure::Io(format!("{address}: {e}")))?;
        if settings.api_keys.is_empty() && !is_loopback(bound.ip()) {
            eprintln!("warning: {bound} is open to the network and no --api-key is set");
        }
        eprintln!("listening on http://{bound}");
        let grace = Duration::from_secs(args.grace);
        server::serve(listener, settings, loaded.tokenizer.clone(), engine, args.max_queue, grace, signal())
            .await
            .map_err(|e| Failure::Io(format!("serving on {bound}: {e}")))
    })
}

fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

/// Ctrl-C or a request to terminate; the second one ends the process at once.
async fn signal() {
    #[cfg(unix)]
    let terminate = async {
        match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
            Ok(mut signal) => {
                signal.recv().await;
            }
            Err(_) => std::future::pending().await,
        }
    };
    #[cfg(not(unix))]
    let terminate = std::future::pending::<()>();
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        () = terminate => {}
    }
    eprintln!("ending: the running answer is finished; Ctrl-C again ends at once");
    tokio::spawn(async {
        if tokio::signal::ctrl_c().await.is_ok() {
            std::process::exit(130);
        }
    });
}
