//! Servers that break the protocol: the agent keeps its link and ends only the affected tunnel.

use adit_core::wire::packets::PacketType;
use adit_core::wire::packets::packet::Payload;

use crate::support::raw::{data, encoded};
use crate::support::stub_server::StubServer;
use crate::support::targets;
use crate::support::world::{World, endpoints_left};

/// Upstream's agent loses its whole link.
///
/// Upstream (packets): Packets of 4 MiB pass; a larger one ends its own tunnel only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_oversized_packet_of_a_server_ends_its_own_tunnel_only() {
    let (target, _echo) = targets::local_echo().await;
    let world = World::start(&[]).await;
    for greeting in [&[][..], &[("adit-link", "1")]] {
        let mut server = StubServer::start(&world).await;
        let agent = world.agent_of(server.port(), "a", &[]).await;
        let caller = server.accept().await;
        assert_eq!(caller.headers["agentid"], "a");
        let mut link = caller.greet(greeting);
        let hurt = link.open_with_window(1, &target, 1 << 20).await;
        let spared = link.open_with_window(2, &target, 1 << 20).await;
        link.echo(hurt, b"before").await;

        let payload = data(hurt, vec![7; (4 << 20) + 1]);
        link.message(&encoded(PacketType::Data.into(), Some(payload)));
        loop {
            match link.payload().await {
                Some(Payload::CloseResponse(close)) if close.connect_id == hurt => {
                    assert!(close.error.contains("oversize"), "{close:?}");
                    break;
                }
                Some(Payload::Window(_)) => (),
                other => panic!("instead of the tunnel's end: {other:?}"),
            }
        }
        // An oversized message without a tunnel is skipped.
        link.message(&vec![0xff; (4 << 20) + 1]);
        link.echo(spared, b"unharmed").await;
        let fresh = link.open_with_window(3, &target, 1 << 20).await;
        link.echo(fresh, b"and new ones open").await;
        endpoints_left(&agent, 2).await;
        let offences = "adit_protocol_offences_total{kind=\"oversize\"} 2";
        assert!(agent.metrics.scrape().text().contains(offences));
        agent.stop().await;
    }
}
