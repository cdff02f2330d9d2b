//! Tests of the connection limits of node listeners. No server exists, so accepted connections wait.

use std::io::ErrorKind;
use std::time::Duration;

use adit_core::ids::AgentId;
use adit_core::wire::identifiers::Identifiers;
use adit_core::wire::metadata::{AgentHello, Extensions, PeerVersion};
use futures_util::poll;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;

use super::*;
use crate::connector::{ForwardProxies, RecentServers, ServerConnector};
use crate::link::tests::context;
use crate::servers::{Servers, ServersSettings};
use crate::sync::{SearchRules, SyncPolicy};
use adit_config::plan::CountSource;
use adit_config::plan::LaneSecurity;
use adit_config::tls_policy::TlsPolicy;
use adit_host::descriptors::Descriptors;
use adit_net::accounts::Accounts;
use adit_net::resolve::SystemResolver;
use adit_net::self_sockets::OwnSockets;
use adit_telemetry::AgentMetrics;
use adit_testkit::certificates::ThrowawayFiles;
use adit_tls::reload::Reloadable;
use adit_tls::tls::{Alpn, ClientTls};

const HOUR: Duration = Duration::from_secs(3600);

/// The proxy of an agent without a server.
fn proxy() -> (Arc<NodeProxy>, AgentMetrics) {
    let files = ThrowawayFiles::create(&["server.test".to_owned()]).expect("certificates");
    let tls = Reloadable::load(ClientTls {
        crl: None,
        ca: files.ca_file(),
        identity: None,
        policy: TlsPolicy::default(),
        alpn: Alpn::grpc::<&str>(&[]),
    })
    .expect("they were just made");
    let (agent, context) = (AgentId::new("a"), context(1));
    let (metrics, tasks) = (context.metrics.clone(), context.tasks.clone());
    let settings = ServersSettings {
        addresses: Vec::new(),
        connector: ServerConnector {
            resolver: Arc::new(SystemResolver::new().unwrap()),
            tls,
            proxies: ForwardProxies::none(),
            accounts: Accounts::off(),
            own_sockets: OwnSockets::off(),
            agent: agent.clone(),
            recent_servers: RecentServers::default(),
        },
        hello: AgentHello {
            agent: agent.clone(),
            identifiers: Identifiers::default(),
            extensions: Extensions::default(),
            version: PeerVersion::default(),
            peer: None,
            zone: None,
        },
        token_path: None,
        count_source: CountSource::default(),
        policy: SyncPolicy {
            interval: HOUR,
            interval_cap: HOUR,
            forever: false,
            rules: SearchRules::Native,
        },
        keepalive: HOUR,
        lanes_max: 0,
        lane_security: LaneSecurity::Tls,
        serves_node: true,
    };
    let servers = Servers::start(settings, context, &tasks);
    let proxy = NodeProxy::new(
        servers.lanes(),
        metrics.adit().clone(),
        Arc::new(Descriptors::unlimited()),
        Accounts::off(),
        agent,
    );
    (proxy, metrics)
}

fn source() -> Arc<dyn DestinationSource> {
    Arc::new(Fixed("10.96.0.1:443".into()))
}

/// A connection: the client's end and the accepted end.
async fn connection(listener: &TcpListener) -> (TcpStream, ByteStream) {
    let client = TcpStream::connect(listener.local_addr().unwrap());
    let (client, accepted) = tokio::join!(client, listener.accept());
    let (socket, peer) = accepted.unwrap();
    (
        client.unwrap(),
        ByteStream::Plain(Socket::Tcp(socket), PeerAddr::Tcp(peer)),
    )
}

/// A connection that holds a slot while the returned values live, and waits for a server.
async fn waits(
    node: &NodeListener,
    listener: &TcpListener,
) -> (TcpStream, impl Future<Output = ()> + use<>) {
    let (client, stream) = connection(listener).await;
    let mut served = Box::pin(node.clone().serve(stream));
    assert!(poll!(served.as_mut()).is_pending());
    (client, served)
}

/// A connection without a slot.
async fn is_reset(node: &NodeListener, listener: &TcpListener) {
    let (mut client, stream) = connection(listener).await;
    Box::pin(node.clone().serve(stream)).await;
    let error = client.read_u8().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

/// Limit (peers): Connections of an agent's node listeners | 4,096 per listener, 16,384 in total, 1,024 without a
/// tunnel
#[tokio::test]
async fn only_connections_above_a_listeners_limit_are_reset() {
    let (proxy, metrics) = proxy();
    let node = NodeListener::with_max(&proxy, source(), 2);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let first = waits(&node, &listener).await;
    let _second = waits(&node, &listener).await;

    is_reset(&node, &listener).await;
    let refused = "adit_node_refusals_total{reason=\"limit\"} 1\n";
    assert!(metrics.scrape().text().contains(refused));

    // Another listener has its own slots, and a slot is free again once its connection ends.
    let _other = waits(&NodeListener::with_max(&proxy, source(), 2), &listener).await;
    drop(first);
    let _third = waits(&node, &listener).await;
    assert!(metrics.scrape().text().contains(refused));
}

/// Limit (peers): Connections of an agent's node listeners
#[tokio::test]
async fn a_connection_above_the_limit_of_all_listeners_is_reset_and_counted() {
    let (proxy, metrics) = proxy();
    proxy.connections.forget_permits(CONNECTIONS_MAX - 2);
    let node = NodeListener::new(&proxy, source());
    let other = NodeListener::new(&proxy, source());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let _first = waits(&node, &listener).await;
    let second = waits(&other, &listener).await;

    for node in [&node, &other] {
        is_reset(node, &listener).await;
    }
    let refused = "adit_node_refusals_total{reason=\"limit\"} 2\n";
    assert!(metrics.scrape().text().contains(refused));

    drop(second);
    let _third = waits(&node, &listener).await;
    assert!(metrics.scrape().text().contains(refused));
}

/// Limit (peers): Connections of an agent's node listeners
#[tokio::test]
async fn listeners_may_have_4096_connections_each_and_16384_together() {
    let (proxy, _metrics) = proxy();
    assert_eq!(proxy.connections.available_permits(), 16_384);
    let node = NodeListener::new(&proxy, source());
    assert_eq!(node.connections.available_permits(), 4096);
}
