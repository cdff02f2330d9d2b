//! Proxies that route TLS connections by ALPN without terminating TLS.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::support::lanes::{HITS, value, warm};
use crate::support::targets;
use crate::support::wait::until;
use crate::support::world::World;

/// Forwards connections whose ClientHello offers `protocol`, and drops all others.
struct Front {
    address: SocketAddr,
    dropped: Arc<AtomicUsize>,
    _accepting: JoinSet<()>,
}

impl Front {
    async fn to(server: SocketAddr, protocol: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let dropped = Arc::new(AtomicUsize::new(0));
        let (mut accepting, dropping) = (JoinSet::new(), Arc::clone(&dropped));
        accepting.spawn(async move {
            let mut copying = JoinSet::new();
            while let Ok((mut near, _peer)) = listener.accept().await {
                let dropped = Arc::clone(&dropping);
                copying.spawn(async move {
                    let mut hello = vec![0; 4096];
                    let bytes = near.peek(&mut hello).await.unwrap_or(0);
                    let offers = hello[..bytes]
                        .windows(protocol.len())
                        .any(|part| part == protocol.as_bytes());
                    if !offers {
                        dropped.fetch_add(1, Relaxed);
                        return;
                    }
                    if let Ok(mut far) = TcpStream::connect(server).await {
                        let _over = tokio::io::copy_bidirectional(&mut near, &mut far).await;
                    }
                });
            }
        });
        Self {
            address,
            dropped,
            _accepting: accepting,
        }
    }
}

/// AKS has such a proxy. Links and lanes offer the ALPN name by which it routes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lanes_pass_a_proxy_that_routes_by_alpn() {
    let (target, _echo) = targets::local_echo().await;
    let world = World::start(&[]).await;
    let front = Front::to(world.server().agents, "konnectivity").await;
    let (port, flags) = (front.address.port(), ["--alpn-proto=konnectivity"]);
    let agent = world.agent_of(port, "agent-1", &flags).await;
    warm(&world).await;
    world.assert_serves(&target).await;
    assert!(value(&world, HITS) >= 1.0);
    assert_eq!(front.dropped.load(Relaxed), 0);
    // An agent without that name does not pass.
    let stranger = world.agent_of(front.address.port(), "agent-2", &[]).await;
    until("a dropped connection", || front.dropped.load(Relaxed) > 0).await;
    world.links(1).await;
    agent.stop().await;
    stranger.stop().await;
}
