//! Blocking work: files, helper processes, name services of libraries. A runtime from [`start_runtime`] has a fixed number
//! of threads for it from the start, so a host that refuses a thread later stops nothing. Each follower of files has threads
//! of its own among them, and keeps at most that many busy: files that block for ever stop no other work.
//!
//! By default tokio starts such a thread on demand, ends it after 10 s, and panics in the caller where the host refuses a
//! thread.

use std::any::Any;
use std::io;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use crossbeam::channel::bounded;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;

/// Threads for blocking work without files. A helper process may hold one; the rest is for short work.
pub const THREADS: usize = 4;
/// Threads of a follower of files: one reads, one sets the watch of their directories up.
pub const THREADS_OF_A_FOLLOWER: usize = 2;
/// Threads end with the runtime.
const KEEP_ALIVE: Duration = Duration::from_secs(365 * 24 * 3600);
/// Wait for one thread before testing whether the host refuses threads.
const PATIENCE: Duration = Duration::from_millis(250);
/// Longest wait for one thread on a host that refuses none.
const START_MAX: Duration = Duration::from_secs(10);

/// The host gives a runtime too few threads.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot start threads: {0}; raise the limit of processes and threads (pids.max of the cgroup, ulimit -u)"
)]
pub struct NoThreads(String);

/// Why blocking work has no result.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BlockingError {
    /// The work panicked. The panic hook has written the message.
    #[error("it panicked, which is a bug; the message is on standard error")]
    Panicked,
    /// The runtime ends.
    #[error("the process is shutting down")]
    Stopping,
}

/// Builds the runtime of `builder`, and starts all its threads for blocking work, with those of so many `followers` of files.
///
/// Where the host refuses a worker, tokio panics, and then waits for ever for the workers started before. `refused` is
/// called before that wait, and must not return where there are workers.
///
/// # Errors
/// The host refuses a thread or a descriptor.
pub fn start_runtime(
    builder: &mut Builder,
    followers: usize,
    refused: impl Fn(&NoThreads) + Send + Sync + 'static,
) -> Result<Runtime, NoThreads> {
    let threads = THREADS + followers * THREADS_OF_A_FOLLOWER;
    builder
        .enable_all()
        .max_blocking_threads(threads)
        .thread_keep_alive(KEEP_ALIVE);
    let runtime = without_panic(refused, || builder.build())?;
    let runtime = runtime.map_err(|error| NoThreads(error.to_string()))?;
    match start_threads(&runtime, threads) {
        Ok(()) => Ok(runtime),
        Err(error) => {
            runtime.shutdown_background();
            Err(error)
        }
    }
}

/// Runs `work` on a blocking thread. A cancelled call leaves it running.
///
/// # Errors
/// [`BlockingError`]: services log it and try again.
pub async fn run<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, BlockingError> {
    begin(work).await.map_err(|error| {
        if error.is_panic() {
            BlockingError::Panicked
        } else {
            BlockingError::Stopping
        }
    })
}

/// As [`run`], for work whose end no caller waits for.
pub fn start(work: impl FnOnce() + Send + 'static) {
    drop(begin(work));
}

#[expect(
    clippy::disallowed_methods,
    reason = "this is the one place that uses the blocking threads"
)]
pub(crate) fn begin<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    tokio::task::spawn_blocking(work)
}

/// Holds each thread until all have started, so that no two pieces of work share one.
fn start_threads(runtime: &Runtime, threads: usize) -> Result<(), NoThreads> {
    let (tell, told) = sync_channel(threads);
    let (hold, held) = bounded::<()>(0);
    for _thread in 0..threads {
        let (tell, held) = (tell.clone(), held.clone());
        spawn(runtime, move || {
            let _started = tell.send(());
            // Ends when `hold` is dropped.
            let _all_started = held.recv();
        })?;
        let since = Instant::now();
        while let Err(waited) = told.recv_timeout(PATIENCE) {
            refused_by_host()?;
            if waited == RecvTimeoutError::Disconnected || since.elapsed() >= START_MAX {
                return Err(NoThreads("the host starts none in time".to_owned()));
            }
            // Tokio queues work without a thread, and asks the host again only for further work.
            spawn(runtime, || ())?;
        }
    }
    drop(hold);
    Ok(())
}

fn spawn(runtime: &Runtime, work: impl FnOnce() + Send + 'static) -> Result<(), NoThreads> {
    let _entered = runtime.enter();
    without_panic(|_error| (), || start(work))
}

/// Tests whether the host refuses one more thread.
fn refused_by_host() -> Result<(), NoThreads> {
    let thread = std::thread::Builder::new().spawn(|| ());
    let ended = thread.map(std::thread::JoinHandle::join);
    ended
        .map(drop)
        .map_err(|error: io::Error| NoThreads(error.to_string()))
}

/// Turns tokio's panic about a refused thread into an error. Only for the start of the process: `refused` is called for the
/// panics of all threads.
fn without_panic<T>(
    refused: impl Fn(&NoThreads) + Send + Sync + 'static,
    work: impl FnOnce() -> T,
) -> Result<T, NoThreads> {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        refused(&NoThreads::of(panic.payload()))
    }));
    let done = catch_unwind(AssertUnwindSafe(work));
    panic::set_hook(hook);
    done.map_err(|panic| NoThreads::of(&*panic))
}

impl NoThreads {
    /// The cause in tokio's panic: the system's error at its end.
    fn of(panic: &(dyn Any + Send)) -> Self {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        let text = text.unwrap_or("the runtime panicked");
        let cause = text
            .rsplit_once("thread: ")
            .map_or(text, |(_, cause)| cause);
        Self(cause.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtime_starts_all_its_blocking_threads_and_no_more() {
        const ALL: usize = THREADS + THREADS_OF_A_FOLLOWER;
        let runtime = start_runtime(&mut Builder::new_current_thread(), 1, |_error| ()).unwrap();
        let (hold, held) = bounded::<()>(0);
        let (tell, told) = sync_channel(ALL + 1);
        for _work in 0..=ALL {
            let (tell, held) = (tell.clone(), held.clone());
            spawn(&runtime, move || {
                tell.send(std::thread::current().id()).unwrap();
                let _released = held.recv();
            })
            .unwrap();
        }
        let at = |_| told.recv_timeout(Duration::from_secs(60)).unwrap();
        let mut threads: Vec<_> = (0..ALL).map(at).collect();
        drop(hold);
        threads.push(at(0));
        threads.sort_by_key(|id| format!("{id:?}"));
        threads.dedup();
        assert_eq!(
            threads.len(),
            ALL,
            "the last waits for a thread of the others"
        );
    }

    #[test]
    fn refused_thread_is_reported_without_a_panic() {
        let refuse = || {
            panic!(
                "OS can't spawn worker thread: {}",
                io::Error::from_raw_os_error(11)
            )
        };
        let (tell, told) = sync_channel(1);
        let tell = move |error: &NoThreads| tell.send(error.to_string()).unwrap();
        let error = without_panic::<()>(tell, refuse).unwrap_err().to_string();
        assert_eq!(told.try_recv().unwrap(), error);
        assert_eq!(
            error,
            "cannot start threads: Resource temporarily unavailable (os error 11); raise the limit of processes and \
             threads (pids.max of the cgroup, ulimit -u)"
        );
    }

    #[tokio::test]
    async fn panic_of_the_work_is_an_error_of_the_call() {
        assert_eq!(run(|| 7).await, Ok(7));
        let lost = run(|| panic!("on purpose")).await;
        assert_eq!(lost, Err::<(), _>(BlockingError::Panicked));
    }
}
