//! The one worker that computes, and the queue before it.
//!
//! A request waits in the queue of its key; the keys take turns, each gives its oldest request. One request computes at a
//! time: [`Engine`] is the seam behind which that may change.

use std::{
    collections::{HashMap, VecDeque},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::Instant,
};

use engine::{Answer, Prompt, Reuse, Session, Watch, sampler::log_probs};
use text::{Event, Tokenizer};
use tokio::sync::mpsc::UnboundedSender;

use crate::metrics::Metrics;

/// What computes answers, one at a time.
pub trait Engine: Send + 'static {
    /// Continues a prompt; `watch` hears what comes and may end it.
    ///
    /// # Errors
    /// Why there is no answer. The engine stays usable.
    fn answer(&mut self, prompt: &Prompt, watch: &mut dyn Watch) -> engine::Result<Answer>;
}

/// An engine of one session.
pub struct SessionEngine {
    /// Turns ids into text.
    pub tokenizer: Arc<Tokenizer>,
    /// The id that ends an answer.
    pub eos: u32,
    /// The session, a scripted one perhaps.
    pub session: Box<dyn Session>,
}

impl Engine for SessionEngine {
    fn answer(&mut self, prompt: &Prompt, watch: &mut dyn Watch) -> engine::Result<Answer> {
        engine::watched(&self.tokenizer, self.eos, &mut *self.session, prompt, watch)
    }
}

/// Reported log-probabilities of one token.
#[derive(Clone, Debug)]
pub struct TokenLog {
    /// The id.
    pub id: u32,
    /// Its log-probability.
    pub log_prob: f32,
    /// The best ids with theirs.
    pub top: Vec<(u32, f32)>,
}

/// What a waiting client hears.
pub enum Update {
    /// The first step is about to run.
    Begin(Reuse),
    /// The log-probabilities of one more token; only where they were asked for.
    Token(TokenLog),
    /// A piece of the answer.
    Event(Event),
    /// The whole of it.
    Done(Box<Answer>),
    /// There is none.
    Failed(Failure),
}

/// Why a request that was accepted has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// HTTP status.
    pub status: u16,
    /// One sentence.
    pub message: String,
}

impl Failure {
    fn unavailable(message: impl Into<String>) -> Self {
        Self { status: 503, message: message.into() }
    }
}

/// A request on its way to the engine.
pub struct Job {
    /// What to continue.
    pub prompt: Prompt,
    /// Alternatives to report for each token; `None` for no log-probabilities.
    pub log_probs: Option<usize>,
    /// Whose request it is.
    pub key: usize,
    /// When it must be done.
    pub deadline: Instant,
    /// When it came.
    pub came: Instant,
    /// Who waits; a closed channel cancels the request.
    pub sender: UnboundedSender<Update>,
}

/// Why a request was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotTaken {
    /// As many wait as may.
    Full,
    /// The server ends.
    Ending,
}

#[derive(Default)]
struct Waiting {
    jobs: HashMap<usize, VecDeque<Job>>,
    /// Keys with a waiting request, in the order of their turns.
    turns: VecDeque<usize>,
    count: usize,
    ending: bool,
}

impl Waiting {
    fn pop(&mut self) -> Option<Job> {
        let key = self.turns.pop_front()?;
        let jobs = self.jobs.get_mut(&key)?;
        let job = jobs.pop_front();
        if jobs.is_empty() {
            self.jobs.remove(&key);
        } else {
            self.turns.push_back(key);
        }
        self.count -= usize::from(job.is_some());
        job
    }

    /// Drops the requests whose client is gone.
    fn sweep(&mut self) {
        for jobs in self.jobs.values_mut() {
            jobs.retain(|job| !job.sender.is_closed());
        }
        self.jobs.retain(|_, jobs| !jobs.is_empty());
        self.turns.retain(|key| self.jobs.contains_key(key));
        self.count = self.jobs.values().map(VecDeque::len).sum();
    }
}

/// The queue, shared by the connections and the worker.
pub struct Queue {
    waiting: Mutex<Waiting>,
    came: Condvar,
    max: usize,
    running: AtomicUsize,
    /// Ends the running answer.
    abort: AtomicBool,
    /// Set when the engine is of no use any more.
    broken: AtomicBool,
}

impl Queue {
    /// An empty queue of at most `max` waiting requests.
    pub fn new(max: usize) -> Self {
        Self {
            waiting: Mutex::default(),
            came: Condvar::new(),
            max,
            running: AtomicUsize::new(0),
            abort: AtomicBool::new(false),
            broken: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        // Nothing panics while the lock is held.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a request; returns how many were before it, the running one included.
    ///
    /// # Errors
    /// The queue is full, or the server ends.
    pub fn push(&self, job: Job) -> Result<usize, NotTaken> {
        let mut waiting = self.lock();
        if waiting.ending || self.broken() {
            return Err(NotTaken::Ending);
        }
        let running = self.running.load(Ordering::SeqCst);
        // The one that computes does not wait.
        if waiting.count + running > self.max {
            waiting.sweep();
            if waiting.count + running > self.max {
                return Err(NotTaken::Full);
            }
        }
        let before = waiting.count + running;
        let key = job.key;
        if !waiting.jobs.contains_key(&key) {
            waiting.turns.push_back(key);
        }
        waiting.jobs.entry(key).or_default().push_back(job);
        waiting.count += 1;
        drop(waiting);
        self.came.notify_one();
        Ok(before)
    }

    /// Requests that wait.
    pub fn len(&self) -> usize {
        let mut waiting = self.lock();
        waiting.sweep();
        waiting.count
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Most requests that wait.
    pub fn limit(&self) -> usize {
        self.max
    }

    /// Requests that compute.
    pub fn running(&self) -> usize {
        self.running.load(Ordering::SeqCst)
    }

    /// Whether the engine failed for good.
    pub fn broken(&self) -> bool {
        self.broken.load(Ordering::SeqCst)
    }

    /// Takes no more requests and fails those that wait; the running one goes on.
    pub fn end(&self) {
        let mut waiting = self.lock();
        waiting.ending = true;
        while let Some(job) = waiting.pop() {
            let failure = Failure::unavailable("the server is shutting down; send the request again later");
            let _ = job.sender.send(Update::Failed(failure));
        }
        drop(waiting);
        self.came.notify_all();
    }

    /// Ends the running answer within one step.
    pub fn abort(&self) {
        self.abort.store(true, Ordering::SeqCst);
    }

    /// The next request; `None` at the end.
    fn next(&self) -> Option<Job> {
        let mut waiting = self.lock();
        loop {
            if let Some(job) = waiting.pop() {
                self.running.store(1, Ordering::SeqCst);
                return Some(job);
            }
            if waiting.ending {
                return None;
            }
            waiting = self.came.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Starts the thread that owns the engine; it ends after [`Queue::end`].
///
/// # Errors
/// The system has no thread to give.
pub fn start(
    mut engine: impl Engine,
    queue: Arc<Queue>,
    metrics: Arc<Metrics>,
) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("engine".into()).spawn(move || {
        while let Some(job) = queue.next() {
            metrics.queue_wait.observe(job.came.elapsed().as_secs_f64());
            let last = compute(&mut engine, &job, &queue, &metrics);
            if last.is_none() {
                queue.broken.store(true, Ordering::SeqCst);
                queue.end();
            }
            metrics.request.observe(job.came.elapsed().as_secs_f64());
            // Before the client hears of the end: what it asks next must not meet its own request.
            queue.running.store(0, Ordering::SeqCst);
            let message = "the engine failed for good; start the server again";
            let broken = || Update::Failed(Failure { status: 500, message: message.into() });
            let _ = job.sender.send(last.unwrap_or_else(broken));
        }
    })
}

/// Answers one request; gives what its client hears last, `None` when the engine is of no use any more.
fn compute(engine: &mut impl Engine, job: &Job, queue: &Queue, metrics: &Metrics) -> Option<Update> {
    let mut follow = Follow { job, queue, metrics, last: None };
    if job.sender.is_closed() {
        return Some(Update::Failed(Failure::unavailable("the client is gone")));
    }
    if let Some(failure) = follow.failure() {
        return Some(Update::Failed(failure));
    }
    let result = catch_unwind(AssertUnwindSafe(|| engine.answer(&job.prompt, &mut follow))).ok()?;
    Some(match (result, follow.failure()) {
        (Ok(_), Some(failure)) => Update::Failed(failure),
        (Ok(answer), None) => {
            metrics.count(&answer);
            Update::Done(Box::new(answer))
        }
        (Err(e), _) => {
            // A grammar that turns out too complex is the request's.
            let status = if matches!(e, engine::Error::Guide(_)) { 400 } else { 500 };
            Update::Failed(Failure { status, message: e.to_string() })
        }
    })
}

/// Passes an answer on to its client.
struct Follow<'a> {
    job: &'a Job,
    queue: &'a Queue,
    metrics: &'a Metrics,
    last: Option<Instant>,
}

impl Follow<'_> {
    /// Why the answer may not go on, its client apart.
    fn failure(&self) -> Option<Failure> {
        if self.queue.abort.load(Ordering::SeqCst) {
            return Some(Failure::unavailable("the server is shutting down; the answer was ended"));
        }
        (Instant::now() >= self.job.deadline).then(|| {
            Failure::unavailable(
                "the request's time is over; ask for less, or start with a longer --deadline",
            )
        })
    }
}

impl Watch for Follow<'_> {
    fn begin(&mut self, reuse: &Reuse) {
        let _ = self.job.sender.send(Update::Begin(reuse.clone()));
    }

    fn token(&mut self, id: u32, logits: &[f32]) {
        let now = Instant::now();
        match self.last {
            None => self.metrics.first_token.observe((now - self.job.came).as_secs_f64()),
            Some(last) => self.metrics.inter_token.observe((now - last).as_secs_f64()),
        }
        self.last = Some(now);
        if let Some(top) = self.job.log_probs {
            let found = log_probs(logits, id, top);
            let log = TokenLog { id, log_prob: found.sampled, top: found.top };
            let _ = self.job.sender.send(Update::Token(log));
        }
    }

    fn event(&mut self, event: &Event) {
        let _ = self.job.sender.send(Update::Event(event.clone()));
    }

    fn stop(&self) -> bool {
        self.job.sender.is_closed() || self.failure().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use text::SamplingParams;
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    fn job(key: usize, id: u32) -> (Job, UnboundedReceiver<Update>) {
        let (sender, receiver) = unbounded_channel();
        let prompt = Prompt::from_ids(vec![id], SamplingParams::default(), 1);
        let now = Instant::now();
        (
            Job { prompt, log_probs: None, key, deadline: now + Duration::from_secs(60), came: now, sender },
            receiver,
        )
    }

    #[test]
    fn keys_take_turns_and_each_is_served_in_order() {
        let queue = Queue::new(10);
        let mut clients = Vec::new();
        for (key, id) in [(1, 10), (1, 11), (1, 12), (2, 20), (3, 30), (2, 21)] {
            let (job, client) = job(key, id);
            assert_eq!(queue.push(job), Ok(clients.len()));
            clients.push(client);
        }
        let order: Vec<u32> = (0..6).map(|_| queue.next().expect("a request").prompt.ids[0]).collect();
        assert_eq!(order, [10, 20, 30, 11, 21, 12]);
    }

    #[test]
    fn a_full_queue_refuses_until_a_client_leaves() {
        let queue = Queue::new(0);
        let (first, client) = job(1, 1);
        assert_eq!(queue.push(first), Ok(0));
        assert_eq!(queue.push(job(2, 2).0), Err(NotTaken::Full));
        drop(client);
        let (third, _client) = job(3, 3);
        assert_eq!(queue.push(third), Ok(0));
        assert_eq!(queue.next().map(|job| job.key), Some(3));
    }

    struct Failing;

    impl Engine for Failing {
        fn answer(&mut self, _: &Prompt, _: &mut dyn Watch) -> engine::Result<Answer> {
            Err(engine::Error::EmptyPrompt)
        }
    }

    #[test]
    fn nothing_computes_once_the_client_has_heard_the_end() {
        let (queue, metrics) = (Arc::new(Queue::new(1)), Arc::new(Metrics::new().unwrap()));
        let worker = start(Failing, queue.clone(), metrics).unwrap();
        for id in 0..2000 {
            let (job, mut client) = job(1, id);
            assert_eq!(queue.push(job), Ok(0));
            assert!(matches!(client.blocking_recv(), Some(Update::Failed(_))));
            assert_eq!(queue.running(), 0);
        }
        queue.end();
        worker.join().unwrap();
    }

    #[test]
    fn the_end_fails_those_that_wait() {
        let queue = Queue::new(2);
        let (waiting, mut client) = job(1, 1);
        assert_eq!(queue.push(waiting), Ok(0));
        queue.end();
        assert!(matches!(client.try_recv(), Ok(Update::Failed(Failure { status: 503, .. }))));
        assert_eq!(queue.push(job(1, 1).0), Err(NotTaken::Ending));
        assert!(queue.next().is_none());
    }
}
