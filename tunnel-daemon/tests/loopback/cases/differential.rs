//! Compares tunnels with a direct connection: the same script runs over both, on each path. Received bytes and the end of
//! each stream must be identical. For resets only the guarantee is checked: a reset arrives as a reset, after a prefix of
//! the bytes.

mod script;

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::Duration;

use adit::agent::RunningAgent;
use adit_net::socket::set_reset_on_close;
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, TcpStream};

use self::script::Script;
use crate::support::clients::{Io, Kind};
use crate::support::connect;
use crate::support::lanes::{BUSY, COPIED, SPLICED, value, warm};
use crate::support::wait::{until, within, within_for};
use crate::support::ways::Way;
use crate::support::world::{World, sample};

/// Covers each `Ending` with small and large sizes.
const SCRIPTS: u64 = 60;
/// Most bulk scripts. Each lasts longer than 20 ms, the interval at which a link may begin another raw lane.
const BULK_SCRIPTS: u64 = 300;
/// Limit for bulk scripts until both movers have been used.
const BULK_WITHIN: Duration = Duration::from_secs(60);

/// The path of a tunnel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Route {
    Link,
    Lanes(Way),
}

impl Route {
    const ALL: [Self; 4] = [
        Self::Link,
        Self::Lanes(Way::Tls),
        Self::Lanes(Way::Epoll),
        Self::Lanes(Way::IoUring),
    ];

    fn path(self) -> &'static str {
        match self {
            Self::Link => "link",
            Self::Lanes(Way::Tls) => "lane",
            Self::Lanes(Way::Epoll | Way::IoUring) => "raw-lane",
        }
    }

    fn has_raw_lanes(self) -> bool {
        self != Self::Link && self != Self::Lanes(Way::Tls)
    }

    fn is_possible(self, test: &str) -> bool {
        match self {
            Self::Link => true,
            Self::Lanes(way) => way.is_possible(test),
        }
    }
}

/// A server, an agent, and a target listener whose connections the test drives.
struct Stage {
    route: Route,
    world: World,
    agent: RunningAgent,
    target: TcpListener,
    tunnels: u32,
}

impl Stage {
    async fn of(route: Route) -> Self {
        let (of_server, of_both): (&[&str], &[&str]) = match route {
            Route::Link => (&["--lanes-per-link=0"], &[]),
            Route::Lanes(way) => (&[], way.flags()),
        };
        let flags = [Kind::Tcp.flags(), of_server, of_both].concat();
        let (world, agent) = World::linked(&flags, of_both).await;
        let target = TcpListener::bind("127.0.0.1:0").await;
        Self {
            route,
            world,
            agent,
            target: target.expect("a free port"),
            tunnels: 0,
        }
    }

    fn target(&self) -> SocketAddr {
        self.target.local_addr().expect("bound")
    }

    /// Both ends of a direct connection.
    async fn plain(&self) -> (TcpStream, TcpStream) {
        let (client, target) = tokio::join!(tcp(self.target()), self.target.accept());
        (client, accepted(target))
    }

    /// Both ends of a tunnel whose client is on TCP.
    async fn tunnel(&mut self) -> (TcpStream, TcpStream) {
        self.prepare().await;
        let [frontend, ..] = self.world.server().frontends[..] else {
            panic!("a frontend on TCP");
        };
        let open = async {
            let mut client = tcp(frontend).await;
            connect::dial(&mut client, &self.target().to_string()).await;
            client
        };
        let (client, target) = tokio::join!(open, self.target.accept());
        (client, accepted(target))
    }

    /// Both ends of a tunnel whose client uses the kind of socket that the script asks for.
    async fn tunnel_for(&mut self, script: &Script) -> (Box<dyn Io>, TcpStream) {
        if script.by_tcp {
            let (client, target) = self.tunnel().await;
            arm(script, &client, &target);
            return (Box::new(client), target);
        }
        self.prepare().await;
        let (socket, target) = (self.world.connect(), self.target().to_string());
        let open = connect::open(&socket, &target);
        let (client, target) = tokio::join!(open, self.target.accept());
        (Box::new(client), accepted(target))
    }

    /// Waits for idle lanes, so that the next tunnel takes this route, and counts that tunnel.
    async fn prepare(&mut self) {
        if self.route != Route::Link {
            warm(&self.world).await;
        }
        self.tunnels += 1;
    }

    /// Plays a script on a direct connection and in a tunnel, and compares the results.
    async fn compare(&mut self, script: &Script) {
        let what = format!("{} on {:?}", script.name, self.route);
        let (plain, tunnel) = within(&what, async {
            let (client, target) = self.plain().await;
            arm(script, &client, &target);
            let plain = script.play(client, target).await;
            let (client, target) = self.tunnel_for(script).await;
            (plain, script.play(client, target).await)
        })
        .await;
        script.assert_promised(&plain, &format!("{what}, without a tunnel"));
        script.assert_promised(&tunnel, &what);
        if !script.is_reset() {
            assert_eq!(tunnel, plain, "{what}, and without a tunnel: {script:?}");
        }
    }

    /// Asserts that each tunnel took this route.
    async fn assert_route(&self) {
        let series = format!(
            "adit_tunnels_opened_total{{path=\"{}\"}}",
            self.route.path()
        );
        assert_eq!(value(&self.world, &series), f64::from(self.tunnels));
        until("no lane is busy", || value(&self.world, BUSY) == 0.0).await;
    }

    /// Whether both ends have moved bytes with both movers. The counters include only ended tunnels.
    fn has_used_both_movers(&self) -> bool {
        let (server, agent) = (&self.world.server().metrics, &self.agent.metrics);
        let texts = [server.scrape().text(), agent.scrape().text()];
        let moved = |series: &'static str| move |text: &String| sample(text, series) > Some(0.0);
        texts.iter().all(moved(COPIED)) && texts.iter().all(moved(SPLICED))
    }
}

/// Makes the side that breaks off send RST when it closes.
fn arm(script: &Script, client: &TcpStream, target: &TcpStream) {
    let sides = [client, target].into_iter().zip(script.breaks_off());
    for (socket, breaks_off) in sides {
        if breaks_off {
            set_reset_on_close(socket).expect("an open socket");
        }
    }
}

/// A connection with TCP_NODELAY, so that each write is sent at once.
async fn tcp(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).await.expect("it listens");
    stream.set_nodelay(true).expect("a flag");
    stream
}

fn accepted(target: io::Result<(TcpStream, SocketAddr)>) -> TcpStream {
    let (stream, _peer) = target.expect("a connection");
    stream.set_nodelay(true).expect("a flag");
    stream
}

/// Plays all scripts on a route. On raw lanes, plays bulk scripts until both movers have been used.
async fn differs_in_nothing(route: Route) {
    if !route.is_possible("differential") {
        return;
    }
    let mut stage = Stage::of(route).await;
    for seed in 0..SCRIPTS {
        stage.compare(&Script::new(seed)).await;
    }
    if route.has_raw_lanes() {
        within_for(BULK_WITHIN, "both movers at both ends", async {
            for seed in 0..BULK_SCRIPTS {
                stage.compare(&Script::bulk(seed)).await;
                if stage.has_used_both_movers() {
                    return;
                }
            }
            panic!("{BULK_SCRIPTS} scripts in bulk, and not both movers at both ends");
        })
        .await;
    }
    stage.assert_route().await;
}

/// Limit (isolation): Bytes and end of a tunnel, compared with a direct connection | identical. A RESET arrives as a
/// reset behind the first bytes
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tunnel_on_the_link_behaves_like_a_direct_connection() {
    differs_in_nothing(Route::Link).await;
}

/// Limit (isolation): Bytes and end of a tunnel, compared with a direct connection
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tunnel_on_a_lane_behaves_like_a_direct_connection() {
    differs_in_nothing(Route::Lanes(Way::Tls)).await;
}

/// Limit (isolation): Bytes and end of a tunnel, compared with a direct connection
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tunnel_on_a_raw_lane_behaves_like_a_direct_connection_with_epoll() {
    differs_in_nothing(Route::Lanes(Way::Epoll)).await;
}

/// Limit (isolation): Bytes and end of a tunnel, compared with a direct connection
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tunnel_on_a_raw_lane_behaves_like_a_direct_connection_with_io_uring() {
    differs_in_nothing(Route::Lanes(Way::IoUring)).await;
}

/// An aborted empty upload must not look complete: the target sees RST, not FIN.
///
/// Limit (isolation): Bytes and end of a tunnel, compared with a direct connection
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_reset_before_the_first_byte_resets_its_target() {
    for route in Route::ALL {
        if !route.is_possible("differential") {
            continue;
        }
        let mut stage = Stage::of(route).await;
        for (client, mut target) in [stage.plain().await, stage.tunnel().await] {
            set_reset_on_close(&client).expect("an open socket");
            drop(client);
            let read = within("the end", target.read(&mut [0])).await;
            let end = read.map_err(|error| error.kind());
            assert_eq!(end, Err(ErrorKind::ConnectionReset), "{route:?}");
        }
    }
}
