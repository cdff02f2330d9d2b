//! Tests of both ends of a link over an in-memory HTTP/2 connection: bytes, half-close, pauses, loss.

mod lingering;
mod paused;

use std::sync::{Arc, Weak};
use std::time::Duration;

use adit_core::failure::DialFailure;
use adit_core::ids::{AgentId, DialId, TunnelKey};
use adit_core::registry::Registry;
use adit_core::session::{Event, Isolation, Link, LinkConfig, ProcessBudget, Role, TunnelEnd};
use adit_core::wire::encode::MessageBuf;
use adit_core::wire::packet::PacketType;
use bytes::Bytes;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
use tokio::sync::{mpsc, oneshot};

use super::*;
use adit_net::grpc::{self, LINK_FRAME_BYTES, Windows};
use adit_tls::agent_identity::AgentIdentity;
use adit_tunnel::*;

const WINDOWS: Windows = Windows {
    frame_bytes: LINK_FRAME_BYTES,
    stream_bytes: 1 << 20,
    send_buffer_bytes: 128 * 1024,
};

/// The test's ends of the connections that the agent would dial.
type Targets = mpsc::Receiver<DuplexStream>;

/// Hooks of one end of the link. The server's end has no dials.
struct Hooks(Option<Dials>);

struct Dials {
    commands: mpsc::WeakSender<Command>,
    targets: mpsc::Sender<DuplexStream>,
}

impl LinkHooks for Hooks {
    fn start_dial(
        &mut self,
        key: TunnelKey,
        _protocol: String,
        address: String,
    ) -> Result<(), String> {
        let dials = self.0.as_ref();
        let Some((dials, commands)) = dials.and_then(|it| Some((it, it.commands.upgrade()?)))
        else {
            return Ok(());
        };
        let targets = dials.targets.clone();
        spawn(async move {
            if address.starts_with("silent") {
                return std::future::pending().await;
            }
            let is_refused = address.starts_with("refused");
            let outcome = match is_refused {
                true => Err("connect: connection refused".to_owned()),
                false => Ok(()),
            };
            let (mut ours, theirs) = duplex(64 * 1024);
            if !is_refused {
                let _sent = targets.send(theirs).await;
            }
            let (sender, endpoint) = oneshot::channel();
            let dialed = Dialed {
                key,
                outcome,
                endpoint: sender,
            };
            let _gone = commands.send(Command::Dialed(dialed)).await;
            drop(commands);
            if let (false, Ok(mut endpoint)) = (is_refused, endpoint.await) {
                let _outcome = copy_bidirectional(&mut ours, &mut endpoint, Bytes::new()).await;
            }
        });
        Ok(())
    }
    fn cancel_dial(&mut self, _key: TunnelKey) {}
    fn dial_finished(&mut self, _key: TunnelKey) {}
    fn peer_draining(&mut self) {}
    fn packet_in(&mut self, _kind: Result<PacketType, i32>) {}
    fn packet_out(&mut self, _kind: PacketType) {}
    fn count(&mut self, _event: Event) {}
    fn opened(&mut self, _key: TunnelKey) {}
}

#[expect(clippy::disallowed_methods, reason = "tests own their tasks")]
fn spawn(work: impl Future<Output = ()> + Send + 'static) {
    tokio::spawn(work);
}

struct World {
    router: Arc<Router>,
    targets: Targets,
    agent: mpsc::Sender<Command>,
    budget: Arc<ProcessBudget>,
    /// The dirty list of the server's end of the link.
    dirty_list: Weak<DirtyList>,
}

fn config(role: Role, credit: bool, isolation: Isolation) -> LinkConfig {
    LinkConfig {
        role,
        credit,
        packet_bytes_max: 32 * 1024,
        dials_max: 128,
        dial_timeout: Some(Duration::from_secs(25)),
        isolation,
        control_max: 10_000,
    }
}

async fn world(credit: bool, isolation: Isolation) -> World {
    let limits = DialLimits {
        pending_max: 1000,
        timeout: Some(Duration::from_secs(25)),
        dead_after: Duration::from_secs(8),
    };
    let router = Router::new(Registry::new("default".parse().unwrap()), limits);
    let budget = Arc::new(ProcessBudget::new(1 << 30));
    let (agent_io, server_io) = duplex(1 << 20);
    let (targets_in, targets) = mpsc::channel(64);
    let (agent, agent_commands) = mpsc::channel(100);

    let server_router = Arc::clone(&router);
    let server_budget = Arc::clone(&budget);
    let (entered_in, entered_out) = oneshot::channel();
    spawn(async move {
        let mut connection = grpc::server_builder(WINDOWS)
            .handshake::<_, MessageBuf>(server_io)
            .await
            .unwrap();
        let (request, mut respond) = connection.accept().await.unwrap().unwrap();
        let send = respond.send_response(grpc::accepted(), false).unwrap();
        let streams = LinkStreams {
            send,
            recv: request.into_body(),
            withhold_bytes: 0,
        };
        let info = LinkInfo {
            agent: AgentId::new("a"),
            identifiers: adit_core::wire::identifiers::Identifiers::default(),
            identity: AgentIdentity::Unverified,
            credit,
            version: adit_core::wire::metadata::PeerVersion::default(),
            address: adit_tls::stream::PeerAddr::Unix,
            dials: Arc::default(),
        };
        let RegisteredLink {
            handle,
            commands,
            guard,
            standing: _,
        } = server_router.register(info, usize::MAX, None).unwrap();
        let config = config(Role::Server, credit, isolation);
        let link = Link::new(config, server_budget, "agent".into());
        let dirty_list = Arc::clone(&handle.dirty_list);
        let entered = Arc::downgrade(&dirty_list);
        drop(handle);
        spawn(async move {
            let _over = LinkDriver::new(link, streams, commands, dirty_list, Hooks(None)).await;
            drop(guard);
        });
        let _sent = entered_in.send(entered);
        while let Some(Ok(_)) = connection.accept().await {}
    });
    let agent_budget = Arc::clone(&budget);
    let agent_sender = agent.downgrade();
    spawn(async move {
        let (requests, connection) = grpc::client_builder(WINDOWS)
            .handshake::<_, MessageBuf>(agent_io)
            .await
            .unwrap();
        spawn(async move {
            let _over = connection.await;
        });
        let mut requests = requests.ready().await.unwrap();
        let request = http::Request::post("http://x/AgentService/Connect")
            .body(())
            .unwrap();
        let (response, send) = requests.send_request(request, false).unwrap();
        let streams = LinkStreams {
            send,
            recv: response.await.unwrap().into_body(),
            withhold_bytes: 0,
        };
        let config = config(Role::Agent, credit, isolation);
        let link = Link::new(config, agent_budget, "server".into());
        let hooks = Hooks(Some(Dials {
            commands: agent_sender,
            targets: targets_in,
        }));
        let dirty_list = Arc::new(DirtyList::default());
        let _over = LinkDriver::new(link, streams, agent_commands, dirty_list, hooks).await;
        drop(requests);
    });
    let dirty_list = entered_out.await.unwrap();
    World {
        router,
        targets,
        agent,
        budget,
        dirty_list,
    }
}

impl World {
    async fn dial(&self, address: &str) -> Result<OpenTunnel, DialFailure> {
        let asked = AskedAgents::default();
        self.router.dial(DialId(7), "tcp", address, &asked).await
    }

    async fn open(&mut self) -> (Endpoint, DuplexStream) {
        let open = self.dial("target:1").await.unwrap();
        (open.carrier, self.targets.recv().await.unwrap())
    }

    async fn idle(&self) {
        tokio::time::timeout(Duration::from_secs(10), async {
            while self.budget.held_bytes() > 0 || self.budget.granted_bytes() > 0 {
                tokio::task::yield_now().await;
            }
        })
        .await
        .expect("every byte and grant is given back");
    }
}

async fn read_data(endpoint: &mut Endpoint, total: usize) -> Vec<u8> {
    let mut got = Vec::new();
    while got.len() < total {
        match endpoint.recv().await {
            Incoming::Data(bytes) => {
                endpoint.drained(bytes.len());
                got.extend_from_slice(&bytes);
            }
            other => panic!("{other:?} after {} bytes", got.len()),
        }
    }
    got
}

async fn ended(endpoint: &mut Endpoint) -> TunnelEnd {
    loop {
        match endpoint.recv().await {
            Incoming::Data(bytes) => endpoint.drained(bytes.len()),
            Incoming::PeerFin => (),
            Incoming::Ended(end) => return end,
        }
    }
}

fn pattern(length: usize) -> Vec<u8> {
    (0..=250).cycle().take(length).collect()
}

async fn bytes_both_ways(credit: bool) {
    let mut world = world(credit, Isolation::default()).await;
    let (mut endpoint, mut target) = world.open().await;
    let sent = pattern(3_000_000);
    let upload = sent.clone();
    let reader = async {
        let mut got = vec![0; upload.len()];
        target.read_exact(&mut got).await.unwrap();
        target.write_all(&got).await.unwrap();
        got
    };
    let writer = async {
        for chunk in sent.chunks(10_000) {
            endpoint.ready().await;
            endpoint.send(Bytes::copy_from_slice(chunk));
        }
        read_data(&mut endpoint, sent.len()).await
    };
    let (at_target, back) = tokio::join!(reader, writer);
    assert!(at_target == sent && back == sent);
    endpoint.close();
    let error = String::new();
    assert_eq!(ended(&mut endpoint).await, TunnelEnd::Closed { error });
    drop(endpoint);
    let mut rest = Vec::new();
    assert_eq!(target.read_to_end(&mut rest).await.unwrap(), 0);
    world.idle().await;
}

#[tokio::test]
async fn bytes_arrive_both_ways_with_credit() {
    bytes_both_ways(true).await;
}

#[tokio::test]
async fn bytes_arrive_both_ways_without_credit() {
    bytes_both_ways(false).await;
}

#[tokio::test]
async fn half_close_leaves_the_other_direction_open_between_adit_ends() {
    let mut world = world(true, Isolation::default()).await;
    let (mut endpoint, mut target) = world.open().await;
    endpoint.send(Bytes::from_static(b"question"));
    endpoint.fin();
    let mut question = String::new();
    target.read_to_string(&mut question).await.unwrap();
    assert_eq!(question, "question");
    target.write_all(b"answer").await.unwrap();
    drop(target);
    assert_eq!(read_data(&mut endpoint, 6).await, b"answer");
    // Both directions have ended, so the agent closed the tunnel.
    let closed = TunnelEnd::Closed {
        error: String::new(),
    };
    assert_eq!(endpoint.recv().await, Incoming::Ended(closed));
    drop(endpoint);
    world.idle().await;
}

/// Limit (memory): Bytes queued from an endpoint towards its link or lane
#[tokio::test]
async fn a_paused_reader_holds_back_only_its_target() {
    let mut world = world(true, Isolation::default()).await;
    let (mut paused, mut flood) = world.open().await;
    spawn(async move {
        let block = vec![1; 64 * 1024];
        while flood.write_all(&block).await.is_ok() {}
    });
    let (mut endpoint, mut target) = world.open().await;
    for round in 0_u32..200 {
        endpoint.send(Bytes::from(round.to_be_bytes().to_vec()));
        let mut got = [0; 4];
        target.read_exact(&mut got).await.unwrap();
        target.write_all(&got).await.unwrap();
        assert_eq!(read_data(&mut endpoint, 4).await, round.to_be_bytes());
    }
    assert!(world.budget.held_bytes() <= adit_core::session::WINDOW_START_BYTES + 4 * 200);
    // Once it reads again, all bytes arrive in order.
    let rest = read_data(&mut paused, 5_000_000).await;
    assert!(rest.iter().all(|byte| *byte == 1));
    drop(paused);
    drop(endpoint);
    world.idle().await;
}

#[tokio::test]
async fn without_credit_a_stalled_reader_is_closed_when_the_budget_is_full() {
    let isolation = Isolation {
        link_budget_bytes: 1 << 20,
        tunnel_share_bytes: 256 << 10,
        ..Isolation::default()
    };
    let mut world = world(false, isolation).await;
    let (mut stalled, mut flood) = world.open().await;
    spawn(async move {
        let block = vec![1; 64 * 1024];
        while flood.write_all(&block).await.is_ok() {}
    });
    let (mut endpoint, mut target) = world.open().await;
    let closed = std::future::poll_fn(|cx| match stalled.poll_aborted(cx) {
        true => std::task::Poll::Ready(()),
        false => std::task::Poll::Pending,
    });
    tokio::time::timeout(Duration::from_secs(20), closed)
        .await
        .expect("the stalled tunnel is closed");
    assert_eq!(stalled.recv().await, Incoming::Ended(TunnelEnd::Budget));
    endpoint.send(Bytes::from_static(b"still here"));
    let mut got = [0; 10];
    target.read_exact(&mut got).await.unwrap();
    target.write_all(&got).await.unwrap();
    assert_eq!(read_data(&mut endpoint, 10).await, b"still here");
}

#[tokio::test]
async fn refused_target_and_lost_link_are_reported_at_once() {
    let world = world(true, Isolation::default()).await;
    let refused = world.dial("refused:1").await.err().unwrap();
    assert!(
        matches!(&refused, DialFailure::Target(text) if text.contains("connection refused")),
        "{refused:?}"
    );
    let pending = world.dial("silent:1");
    let lose = async {
        while world.router.pending_dials() == 0 {
            tokio::task::yield_now().await;
        }
        tokio::task::yield_now().await;
        world.agent.send(Command::Stop).await.unwrap();
    };
    let (outcome, ()) = tokio::join!(pending, lose);
    assert_eq!(outcome.err(), Some(DialFailure::LinkLost));
    let after = world.dial("any:1").await.err();
    assert_eq!(after, Some(DialFailure::NoAgent));
    world.idle().await;
}

#[tokio::test]
async fn a_client_that_leaves_during_the_dial_leaves_no_state() {
    let world = world(true, Isolation::default()).await;
    {
        let mut dial = std::pin::pin!(world.dial("silent:1"));
        let _pending = futures_util::poll!(&mut dial);
        while world.budget.granted_bytes() == 0 {
            tokio::task::yield_now().await;
        }
    }
    world.idle().await;
    assert_eq!(world.router.pending_dials(), 0);
}

#[tokio::test]
async fn last_bytes_are_flushed_from_a_buffering_socket() {
    let mut world = world(true, Isolation::default()).await;
    let (mut endpoint, mut target) = world.open().await;
    let (ours, mut client) = duplex(8 * 1024);
    // Buffers like a TLS stream: it forwards bytes beyond its capacity, and the rest when flushed.
    let mut ours = tokio::io::BufWriter::with_capacity(32 * 1024, ours);
    spawn(async move {
        let _outcome = copy_bidirectional(&mut ours, &mut endpoint, Bytes::new()).await;
    });
    let sent = pattern(100_000);
    let mut got = vec![0; sent.len()];
    let both = async {
        let (wrote, read) = tokio::join!(target.write_all(&sent), client.read_exact(&mut got));
        (wrote.unwrap(), read.unwrap())
    };
    tokio::time::timeout(Duration::from_secs(5), both)
        .await
        .expect("every byte arrives while the tunnel stays open");
    assert_eq!(got, sent);
}

/// A truncated stream is neither reported nor counted as a clean end.
#[tokio::test(start_paused = true)]
async fn bytes_stuck_behind_a_close_end_the_tunnel_as_linger_expired() {
    let mut world = world(false, Isolation::default()).await;
    let (mut endpoint, mut target) = world.open().await;
    target.write_all(&pattern(50_000)).await.unwrap();
    drop(target);
    let (mut stuck, _never_read) = duplex(100);
    let outcome = copy_bidirectional(&mut stuck, &mut endpoint, Bytes::new()).await;
    assert!(
        matches!(outcome.end, CopyEnd::Tunnel(TunnelEnd::LingerExpired)),
        "{outcome:?}"
    );
    assert_eq!(outcome.to_socket, 100);
    drop(endpoint);
    world.idle().await;
}
