//! Bounded tasks: the only place where the program spawns. Work is admitted up to a limit or refused. Callers can wait for
//! the end of all tasks, and a panic ends its own task only.

use std::{
    future::Future,
    panic::AssertUnwindSafe,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures_util::FutureExt as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::{
    sync::{CancellationToken, WaitForCancellationFutureOwned},
    task::TaskTracker,
};

/// Service tasks (listeners, watchers, timers) at once per [`Tasks`]. More means that something spawns them in a loop.
const SERVICES_MAX: usize = 256;

/// No room for another task: the work was dropped without being started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("all {limit} task slots are in use")]
pub struct Overloaded {
    /// The limit that was hit.
    pub limit: usize,
}

/// Work that was admitted and is polled by its owner.
pub type Admitted = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Outcome of [`Tasks::drain`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "says whether work was cut off"]
pub struct Drained {
    /// Tasks that were cut off at the deadline.
    pub cut_off: usize,
}

/// A group of tasks. Clones name the same group.
#[derive(Clone, Debug)]
pub struct Tasks(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    limit: usize,
    permits: Arc<Semaphore>,
    tracker: TaskTracker,
    stopping: CancellationToken,
    cut_off: CancellationToken,
    /// Set before `cut_off` is cancelled: tasks check it at every poll, and the token has a lock.
    is_cut_off: AtomicBool,
    panics: AtomicU64,
    services: Arc<Semaphore>,
    /// Service tasks may end from now on.
    services_may_end: AtomicBool,
    /// Service tasks that ended before that, each once.
    ended: Mutex<Vec<&'static str>>,
}

impl Tasks {
    /// A group that runs at most `limit` tasks at once, service tasks not counted.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        let limit = limit.min(Semaphore::MAX_PERMITS);
        Self(Arc::new(Inner {
            limit,
            permits: Arc::new(Semaphore::new(limit)),
            tracker: TaskTracker::new(),
            stopping: CancellationToken::new(),
            cut_off: CancellationToken::new(),
            is_cut_off: AtomicBool::new(false),
            panics: AtomicU64::new(0),
            services: Arc::new(Semaphore::new(SERVICES_MAX)),
            services_may_end: AtomicBool::new(false),
            ended: Mutex::default(),
        }))
    }

    /// Starts `work` if there is room. `name` names the task in the log of a panic.
    ///
    /// # Errors
    /// The limit is reached; `work` was dropped.
    pub fn spawn(
        &self,
        name: &'static str,
        work: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), Overloaded> {
        let permit = self.permit()?;
        self.start(name, work, permit, false);
        Ok(())
    }

    /// Admits `work` like [`Self::spawn`], to be polled inside the caller's task. A panic ends only `work`.
    ///
    /// # Errors
    /// The limit is reached; `work` was dropped.
    pub fn admit(
        &self,
        name: &'static str,
        work: impl Future<Output = ()> + Send + 'static,
    ) -> Result<Admitted, Overloaded> {
        let permit = self.permit()?;
        let inner = Arc::clone(&self.0);
        let work = Box::pin(work); // each layer around it would keep it twice
        let guarded = async move {
            let guard = PanicGuard {
                name,
                is_service: false,
                inner: &inner,
            };
            work.await;
            drop(guard);
        };
        let caught = AssertUnwindSafe(guarded).catch_unwind();
        Ok(Box::pin(self.0.tracker.track_future(async move {
            // The guard has counted and logged a panic.
            let _panicked = caught.await;
            drop(permit);
        })))
    }

    /// Whether one more task may start now.
    #[must_use]
    pub fn has_room(&self) -> bool {
        !self.0.permits.is_closed() && self.0.permits.available_permits() > 0
    }

    fn permit(&self) -> Result<OwnedSemaphorePermit, Overloaded> {
        let limit = self.0.limit;
        let permit = Arc::clone(&self.0.permits).try_acquire_owned();
        permit.map_err(|_full| Overloaded { limit })
    }

    /// Starts one of the fixed few tasks of a program. Not for anything a peer can cause. Its end, by return or panic, is
    /// an error that [`Self::ended_services`] names, until [`Self::services_may_end`].
    ///
    /// # Panics
    /// When 256 service tasks run: a loop has called this, which is a bug.
    pub fn spawn_always(
        &self,
        name: &'static str,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        let permit = Arc::clone(&self.0.services).try_acquire_owned();
        assert!(
            permit.is_ok(),
            "service task {name}: {SERVICES_MAX} run already"
        );
        self.start(name, work, permit, true);
    }

    /// The program shuts down: from now on a service task that ends is no error.
    pub fn services_may_end(&self) {
        self.0.services_may_end.store(true, Ordering::Release);
    }

    /// Notes that a service of this program, run elsewhere, has ended, as if it were one of these tasks.
    pub fn service_ended(&self, name: &'static str) {
        self.0.service_ended(name);
    }

    /// Service tasks that ended though they never should.
    #[must_use]
    pub fn ended_services(&self) -> Vec<&'static str> {
        self.0.ended().clone()
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "this is the one place that spawns: counted, tracked and cut off below"
    )]
    fn start(
        &self,
        name: &'static str,
        work: impl Future<Output = ()> + Send + 'static,
        held: impl Send + 'static,
        is_service: bool,
    ) {
        let guarded = Guarded {
            work: Some(work),
            cut_off: self.0.cut_off.clone().cancelled_owned(),
            is_registered: false,
            is_service,
            name,
            inner: Arc::clone(&self.0),
            _held: held,
        };
        let tracked = self.0.tracker.track_future(guarded);
        tokio::spawn(tracked);
    }

    /// Cancelled when [`Tasks::drain`] starts: tasks that would never end by themselves watch it.
    #[must_use]
    pub fn stopping(&self) -> CancellationToken {
        self.0.stopping.clone()
    }

    /// Whether [`Self::drain`] has begun.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.0.stopping.is_cancelled()
    }

    /// Tasks that run now, service tasks included.
    #[must_use]
    pub fn running(&self) -> usize {
        self.0.tracker.len()
    }

    /// Tasks that panicked so far.
    #[must_use]
    pub fn panics(&self) -> u64 {
        self.0.panics.load(Ordering::Relaxed)
    }

    /// Asks all tasks to stop, waits at most `deadline`, cuts off (drops) the rest and waits for their end. The first call
    /// ends admission. If the call is cancelled, tasks go on; call again.
    pub async fn drain(&self, deadline: Duration) -> Drained {
        self.0.permits.close();
        self.services_may_end();
        self.0.stopping.cancel();
        self.0.tracker.close();
        let cut_off = match tokio::time::timeout(deadline, self.0.tracker.wait()).await {
            Ok(()) => 0,
            Err(_elapsed) => {
                let left = self.running();
                self.0.is_cut_off.store(true, Ordering::Release);
                self.0.cut_off.cancel();
                self.0.tracker.wait().await;
                left
            }
        };
        Drained { cut_off }
    }
}

impl Inner {
    fn ended(&self) -> std::sync::MutexGuard<'_, Vec<&'static str>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn service_ended(&self, name: &'static str) {
        if self.services_may_end.load(Ordering::Acquire) {
            return;
        }
        tracing::error!(
            task = name,
            "a service task has ended: this process is not ready until it is restarted"
        );
        let mut ended = self.ended();
        if !ended.contains(&name) {
            ended.push(name);
        }
    }
}

pin_project_lite::pin_project! {
    /// Work in a task of its own. Not an `async` block, which would keep the work twice.
    struct Guarded<F, H> {
        // `None` once it is over.
        #[pin]
        work: Option<F>,
        // Polled once, to register the waker of this task, the only one there is. The future must not yield to other work
        // before it has registered; futures of tokio's `Notify` do not.
        #[pin]
        cut_off: WaitForCancellationFutureOwned,
        is_registered: bool,
        is_service: bool,
        name: &'static str,
        inner: Arc<Inner>,
        _held: H,
    }
}

impl<F: Future<Output = ()>, H> Future for Guarded<F, H> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut this = self.project();
        // Also counts a panic of what is dropped below.
        let _guard = PanicGuard {
            name: this.name,
            is_service: *this.is_service,
            inner: this.inner,
        };
        let work = this.work.as_mut().as_pin_mut();
        let is_over = work.is_none_or(|work| work.poll(cx).is_ready());
        if is_over && *this.is_service {
            this.inner.service_ended(this.name);
        }
        let is_cut_off = || {
            if *this.is_registered {
                this.inner.is_cut_off.load(Ordering::Acquire)
            } else {
                *this.is_registered = true;
                this.cut_off.poll(cx).is_ready()
            }
        };
        if is_over || is_cut_off() {
            this.work.set(None);
            return Poll::Ready(());
        }
        Poll::Pending
    }
}

/// Dropped while unwinding exactly when the task panicked. Tokio itself catches the panic.
struct PanicGuard<'a> {
    name: &'static str,
    is_service: bool,
    inner: &'a Inner,
}

impl Drop for PanicGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.inner.panics.fetch_add(1, Ordering::Relaxed);
            tracing::error!(
                task = self.name,
                "task panicked; this is a bug, the message is on standard error"
            );
            if self.is_service {
                self.inner.service_ended(self.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::pending;
    use tokio::sync::oneshot;

    #[tokio::test]
    async fn work_beyond_the_limit_is_refused_and_admitted_once_there_is_room() {
        let tasks = Tasks::new(1);
        let (release, released) = oneshot::channel::<()>();
        tasks
            .spawn("first", async move { drop(released.await) })
            .unwrap();
        assert_eq!(
            tasks.spawn("second", async {}),
            Err(Overloaded { limit: 1 })
        );
        release.send(()).unwrap();
        while tasks.spawn("third", async {}).is_err() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn admitted_work_counts_against_the_limit_and_its_panic_ends_it_alone() {
        let tasks = Tasks::new(2);
        let bad = tasks.admit("bad", async { panic!("on purpose") }).unwrap();
        let good = tasks.admit("good", async {}).unwrap();
        let third = tasks.admit("third", async {});
        assert_eq!(third.err(), Some(Overloaded { limit: 2 }));
        assert_eq!(tasks.running(), 2);
        tokio::join!(bad, good);
        assert_eq!((tasks.panics(), tasks.running()), (1, 0));
        assert!(tasks.admit("there is room again", async {}).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn drain_waits_for_tasks_that_heed_the_stop() {
        let tasks = Tasks::new(8);
        let stopping = tasks.stopping();
        tasks.spawn_always("service", async move { stopping.cancelled().await });
        let (release, released) = oneshot::channel::<()>();
        tasks
            .spawn("work", async move { drop(released.await) })
            .unwrap();
        let stopping = tasks.stopping();
        tasks
            .spawn("releases the other", async move {
                stopping.cancelled().await;
                release.send(()).unwrap();
            })
            .unwrap();
        assert_eq!(
            tasks.drain(Duration::from_secs(5)).await,
            Drained { cut_off: 0 }
        );
        assert_eq!(tasks.running(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn drain_cuts_off_tasks_after_the_deadline() {
        let tasks = Tasks::new(8);
        let (held, dropped) = oneshot::channel::<()>();
        tasks
            .spawn("stuck", async move {
                let _held = held;
                pending().await
            })
            .unwrap();
        let started = tokio::time::Instant::now();
        assert_eq!(
            tasks.drain(Duration::from_secs(5)).await,
            Drained { cut_off: 1 }
        );
        assert_eq!(started.elapsed(), Duration::from_secs(5));
        assert!(dropped.await.is_err(), "the work was dropped");
    }

    /// The task was woken and made progress, and then waits again.
    #[tokio::test(start_paused = true)]
    async fn drain_cuts_off_a_task_that_worked_and_waits_again() {
        let tasks = Tasks::new(8);
        let (held, dropped) = oneshot::channel::<()>();
        let (go, gone) = oneshot::channel::<()>();
        let (worked, works) = oneshot::channel::<()>();
        tasks
            .spawn("stuck", async move {
                let _held = held;
                gone.await.unwrap();
                worked.send(()).unwrap();
                pending().await
            })
            .unwrap();
        tokio::task::yield_now().await;
        go.send(()).unwrap();
        works.await.unwrap();
        let cut_off = tokio::time::timeout(Duration::from_secs(60), tasks.drain(Duration::ZERO));
        assert_eq!(cut_off.await, Ok(Drained { cut_off: 1 }));
        assert!(dropped.await.is_err(), "the work was dropped");
    }

    #[tokio::test]
    async fn a_panic_of_a_cut_off_task_is_counted() {
        struct Bad;
        impl Drop for Bad {
            fn drop(&mut self) {
                panic!("on purpose");
            }
        }
        let tasks = Tasks::new(1);
        tasks
            .spawn("panics", async {
                let _bad = Bad;
                pending().await
            })
            .unwrap();
        tokio::task::yield_now().await;
        let drained = tasks.drain(Duration::ZERO).await;
        assert_eq!((drained, tasks.panics()), (Drained { cut_off: 1 }, 1));
    }

    #[tokio::test]
    async fn service_that_returns_or_panics_is_named_until_services_may_end() {
        let tasks = Tasks::new(8);
        tasks.spawn_always("returns", async {});
        tasks.spawn_always("panics", async { panic!("on purpose") });
        tasks.spawn("work", async {}).unwrap();
        let (release, released) = oneshot::channel::<()>();
        tasks.spawn_always("service", async move { drop(released.await) });
        while tasks.running() > 1 {
            tokio::task::yield_now().await;
        }
        let mut ended = tasks.ended_services();
        ended.sort_unstable();
        assert_eq!(ended, ["panics", "returns"]);
        tasks.services_may_end();
        release.send(()).unwrap();
        while tasks.running() > 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(tasks.ended_services().len(), 2);
    }

    #[tokio::test]
    async fn nothing_is_admitted_once_draining() {
        let tasks = Tasks::new(8);
        let _drained = tasks.drain(Duration::ZERO).await;
        assert!(tasks.spawn("late", async {}).is_err());
    }

    #[tokio::test]
    async fn panic_is_counted_and_frees_its_slot() {
        let tasks = Tasks::new(1);
        tasks
            .spawn("panics", async { panic!("on purpose") })
            .unwrap();
        while tasks.running() > 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(tasks.panics(), 1);
        tasks.spawn("next", async {}).unwrap();
    }
}
