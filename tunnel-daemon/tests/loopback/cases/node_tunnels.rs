//! Node to control plane: tunnels that an agent opens for whoever connects to its listeners.

use crate::support::lanes::value as at_server;
use crate::support::node::{self, OPENED, assert_quiet, connect, echo};
use crate::support::targets;
use crate::support::wait::until;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_reach_their_destination_through_the_server() {
    let (port, _target) = targets::echo().await;
    let destination = format!("127.0.0.1:{port}");
    let (world, agent) = node::world(&[&destination], &[&destination]).await;
    for round in 1..=20 {
        let mut stream = connect(agent.target_listeners[0]).await;
        echo(&mut stream, b"from the node").await;
        drop(stream);
        until("it is counted", || {
            at_server(&world, OPENED) == f64::from(round)
        })
        .await;
    }
    assert_quiet(&world, &agent).await;
    assert_eq!(node::value(&agent, OPENED), 20.0);
    assert_eq!(node::refused(&agent), 0.0);
    for series in ["to_target", "to_client"] {
        let series = format!("adit_node_tunnel_bytes_total{{direction=\"{series}\"}}");
        assert_eq!(at_server(&world, &series), 20.0 * 13.0);
        assert_eq!(node::value(&agent, &series), 20.0 * 13.0);
    }
}
