//! Tunnels opened by agents: how an OPEN on an idle lane is noticed, and what answers it.
//!
//! No task waits on an idle lane. Where agents may open tunnels, each lane's waker marks the lane readable, and one task serves
//! the pool's readable lanes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Wake, Waker};

use adit_core::lane::{OpenRequest, RefusalCode};
use adit_core::session::{Promise, Queued, TunnelKind};
use tokio::sync::Notify;

use super::{IDLE_BATCH_LANES, LanePool};
use crate::endpoint::Endpoint;
use crate::lane::Lane;
use crate::lane_path::LaneOwner as _;
use crate::until_answered::until_answered;
use adit_telemetry::labels::{LaneCloseReason, LaneState};

/// Decides on tunnels that one agent asks for.
pub trait AgentOpens: Send + Sync {
    /// The agent has asked for a tunnel. Must not block.
    fn open(&self, open: AgentOpen);
}

/// A tunnel that an agent has asked for. Dropping it without an answer refuses it.
pub struct AgentOpen {
    lane: Option<Lane>,
    request: OpenRequest,
    pool: Arc<LanePool>,
}

impl AgentOpen {
    /// The agent's OPEN.
    #[must_use]
    pub fn request(&self) -> &OpenRequest {
        &self.request
    }

    /// Waits for `work`; `None` when the agent has withdrawn its OPEN, or the lane failed.
    pub async fn until<T>(&mut self, work: impl Future<Output = T> + Unpin) -> Option<T> {
        let lane = self.lane.as_mut()?;
        match until_answered(lane, work, |_want| ()).await {
            Ok(outcome) => outcome,
            Err(failure) => {
                self.lane = None;
                self.pool.lost(&failure);
                None
            }
        }
    }

    /// Reserves memory for the tunnel; `None` without room.
    #[must_use]
    pub fn promise(&self) -> Option<Promise> {
        self.pool.settings.budget.promise(TunnelKind::Socket)
    }

    /// Answers OPENED; `None` when the lane is lost.
    #[must_use]
    pub fn accept(mut self) -> Option<Endpoint> {
        let mut lane = self.lane.take()?;
        lane.end().accept();
        let owner = Arc::new(Arc::clone(&self.pool));
        Some(Endpoint::on_lane(lane, owner))
    }

    /// Answers FAILED, with the reason.
    pub fn refuse(mut self, code: RefusalCode, text: &str) {
        self.answer(code, text);
    }

    fn answer(&mut self, code: RefusalCode, text: &str) {
        let Some(mut lane) = self.lane.take() else {
            return;
        };
        lane.end().refuse(code, text);
        let owner = Arc::clone(&self.pool);
        // In a background task: an agent may have sent the next OPEN already, and many more behind it.
        let back = async move {
            let queued = Queued::none(owner.budget());
            owner.take_back(lane, queued);
        };
        let tasks = &self.pool.settings.tasks;
        if tasks.spawn("lane-settles", back).is_err() {
            self.pool.closed(LaneCloseReason::Lost);
        }
    }
}

impl Drop for AgentOpen {
    fn drop(&mut self) {
        // A limit says that nobody was asked, which is not known after a panic.
        let (code, text) = if std::thread::panicking() {
            (RefusalCode::Failed, "the server has failed, which is a bug")
        } else {
            (
                RefusalCode::Limit,
                "the server has reached a limit for tunnels that others open",
            )
        };
        self.answer(code, text);
    }
}

/// Waker state of an idle lane's socket.
pub(super) struct ReadReady {
    is_ready: AtomicBool,
    became_readable: Arc<Notify>,
}

impl Wake for ReadReady {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_ready.store(true, Relaxed);
        self.became_readable.notify_one();
    }
}

/// A lane that waits for a tunnel.
pub(super) struct Waiting {
    /// Boxed: the vector holds thousands, and removing one moves those behind it under the pool's lock.
    pub(super) lane: Box<Lane>,
    ready: Option<Arc<ReadReady>>,
}

impl Waiting {
    /// The waker to poll the lane with: a no-op, or one that marks the lane readable. Clears an earlier mark.
    pub(super) fn waker(&self) -> Waker {
        self.ready.as_ref().map_or_else(
            || Waker::noop().clone(),
            |ready| {
                ready.is_ready.store(false, Relaxed);
                Waker::from(Arc::clone(ready))
            },
        )
    }

    pub(super) fn is_readable(&self) -> bool {
        let is_ready = |ready: &Arc<ReadReady>| ready.is_ready.load(Relaxed);
        self.ready.as_ref().is_some_and(is_ready)
    }
}

impl LanePool {
    /// Wraps a lane that becomes idle.
    pub(super) fn waiting(&self, mut lane: Lane) -> Waiting {
        lane.count_as(self.settings.metrics.lanes.of(LaneState::Idle).guard());
        let ready = self.settings.opens.as_ref().map(|_| {
            Arc::new(ReadReady {
                is_ready: AtomicBool::new(false),
                became_readable: Arc::clone(&self.became_readable),
            })
        });
        let lane = Box::new(lane);
        Waiting { lane, ready }
    }

    /// The agent has opened a tunnel on a lane that was idle.
    pub(super) fn agent_open(self: &Arc<Self>, mut lane: Lane, request: OpenRequest) -> AgentOpen {
        lane.count_as(self.settings.metrics.lanes.of(LaneState::Busy).guard());
        AgentOpen {
            lane: Some(lane),
            request,
            pool: Arc::clone(self),
        }
    }

    /// Serves readable lanes until the link is gone. Needed only where agents may open tunnels.
    pub async fn serve_ready(self: Arc<Self>) {
        let gone = self.gone.clone();
        while gone
            .run_until_cancelled(self.became_readable.notified())
            .await
            .is_some()
        {
            // Outside the task's cooperative budget, which would make lanes look unreadable.
            tokio::task::unconstrained(async { self.serve_batch() }).await;
            tokio::task::yield_now().await;
        }
    }

    /// Serves one batch of readable lanes: an agent may have thousands, with many frames on each.
    fn serve_batch(self: &Arc<Self>) {
        let mut idle = self.lock();
        let readable: Vec<Waiting> = idle
            .lanes
            .extract_if(.., |waiting| waiting.is_readable())
            .take(IDLE_BATCH_LANES)
            .collect();
        drop(idle);
        if readable.len() == IDLE_BATCH_LANES {
            // More lanes may be readable.
            self.became_readable.notify_one();
        }
        let usable = readable
            .into_iter()
            .filter_map(|waiting| self.usable(waiting))
            .collect();
        self.put_back(usable);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use adit_core::lane::{FrameReader, LaneRole};
    use adit_core::session::ProcessBudget;
    use bytes::Bytes;
    use tokio::net::{TcpListener, TcpStream};

    use super::super::{LanePlaces, PoolSettings};
    use super::*;
    use crate::lane::LaneRoom;
    use adit_host::descriptors::Descriptors;
    use adit_net::tasks::Tasks;
    use adit_telemetry::ServerMetrics;
    use adit_tls::agent_identity::AgentIdentity;

    const LANES: usize = 3 * IDLE_BATCH_LANES;

    /// Opens no tunnel.
    struct Nobody;

    impl AgentOpens for Nobody {
        fn open(&self, _open: AgentOpen) {}
    }

    impl LanePlaces for Nobody {
        fn reserve(&self, _lanes: usize) -> usize {
            0
        }
    }

    fn pool() -> Arc<LanePool> {
        LanePool::new(PoolSettings {
            identity: AgentIdentity::Unverified,
            rights: None,
            lanes_max: LANES,
            dials_max: 1,
            silence_max: Duration::from_secs(60),
            room: Arc::new(LaneRoom::new(LANES, Arc::new(Descriptors::unlimited()))),
            tasks: Tasks::new(1),
            metrics: ServerMetrics::new(&["default"]).adit().clone(),
            watch: Arc::default(),
            budget: Arc::new(ProcessBudget::new(1 << 30)),
            opens: Some(Arc::new(Nobody)),
            places: Arc::new(Nobody),
        })
    }

    fn is_ready(pool: &LanePool) -> usize {
        let idle = pool.lock();
        idle.lanes.iter().filter(|lane| lane.is_readable()).count()
    }

    /// Other tasks run between two batches, however many lanes an agent uses at once.
    #[tokio::test]
    async fn ready_lanes_are_served_in_batches_until_none_is_left() {
        let pool = pool();
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let mut agents = Vec::new();
        for _lane in 0..LANES {
            let agent = TcpStream::connect(listener.local_addr().unwrap());
            let (agent, accepted) = tokio::join!(agent, listener.accept());
            agents.push(agent.unwrap());
            let (socket, frames) = (accepted.unwrap().0, FrameReader::default());
            let lane = Lane::in_clear(socket, LaneRole::Server, frames, Bytes::new());
            let slot = pool.slot().unwrap();
            pool.add(lane, slot);
        }
        for waiting in &pool.lock().lanes {
            waiting.ready.as_ref().unwrap().wake_by_ref();
        }
        assert_eq!(is_ready(&pool), LANES);
        pool.serve_batch();
        assert_eq!(is_ready(&pool), LANES - IDLE_BATCH_LANES);

        let all = async {
            while is_ready(&pool) > 0 {
                tokio::task::yield_now().await;
            }
        };
        let answering = async {
            tokio::select! {
                () = all => (),
                () = Arc::clone(&pool).serve_ready() => panic!("its link lives"),
            }
        };
        let answered = tokio::time::timeout(Duration::from_secs(10), answering);
        answered.await.expect("all are answered");
        assert_eq!(pool.idle_lanes(), LANES);
    }
}
