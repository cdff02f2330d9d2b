//! Agents that authenticate with a service account token: which tokens are accepted, in which words others are refused, and
//! what an agent with a token can do.

use std::path::{Path, PathBuf};

use adit::agent::RunningAgent;
use bytes::Bytes;
use serde_json::json;
use tempfile::TempDir;
use tokio::io::AsyncReadExt as _;

use crate::support::api::{self, FakeApi, Fault};
use crate::support::lanes;
use crate::support::raw::{Call, Connection, grpc_status};
use crate::support::stub_lane::Stub;
use crate::support::wait::{until, within};
use crate::support::world::World;
use crate::support::{node, targets, tls};

const AGENT: &str = "system:serviceaccount:kube-system:konnectivity-agent";
const AUDIENCE: &str = "system:konnectivity-server";

/// A server that has tokens reviewed, and the API server that reviews them.
pub(super) struct Tokens {
    pub(super) world: World,
    pub(super) api: FakeApi,
    folder: TempDir,
}

/// The server's flags for token reviews.
fn token_flags(folder: &TempDir) -> Vec<String> {
    vec![
        "--agent-namespace=kube-system".to_owned(),
        "--agent-service-account=konnectivity-agent".to_owned(),
        format!("--authentication-audience={AUDIENCE}"),
        format!(
            "--kubeconfig={}",
            folder.path().join("kubeconfig").display()
        ),
    ]
}

impl Tokens {
    /// A server that requires a token and no certificate.
    pub(super) async fn start(flags: &[&str]) -> Self {
        Self::start_with(&[&["!--cluster-ca-cert"], flags].concat()).await
    }

    async fn start_with(flags: &[&str]) -> Self {
        let folder = TempDir::new().expect("a folder");
        let api = FakeApi::start().await;
        api.write_kubeconfig(&folder.path().join("kubeconfig"));
        let own = token_flags(&folder);
        let all: Vec<&str> = own
            .iter()
            .map(String::as_str)
            .chain(flags.iter().copied())
            .collect();
        let world = World::start(&all).await;
        Self { world, api, folder }
    }

    /// The `authorization` value of an agent, with a new token of a node.
    pub(super) fn bearer(&self, node: &str) -> String {
        format!("Bearer {}", self.api.issue(AGENT, AUDIENCE, node))
    }

    /// Writes a new token of a node to a file.
    fn token_file(&self, node: &str) -> PathBuf {
        let file = self.folder.path().join(format!("token-{node}"));
        let token = self.api.issue(AGENT, AUDIENCE, node);
        // Most tools end the file with a newline.
        std::fs::write(&file, format!("{token}\n")).expect("a file");
        file
    }

    /// An agent with a token and without a certificate.
    async fn agent(&self, id: &str, node: &str, flags: &[&str]) -> RunningAgent {
        let token = format!("--token-path={}", self.token_file(node).display());
        let own = ["!--agent-cert", "!--agent-key", &token];
        self.world.agent(id, &[&own, flags].concat()).await
    }

    /// A connection to the agent port without a certificate.
    pub(super) async fn stranger(&self) -> Connection {
        let agents = self.world.server().agents;
        let stream = tls::dial_to(&self.world, b"h2", agents, None).await;
        Connection::over(stream.expect("a handshake")).await
    }

    /// Asserts that TLS refuses a peer with this pair of certificate and key, or without one.
    async fn assert_no_handshake(&self, identity: Option<(&Path, &Path)>) {
        let ca = self.world.files.ca_file();
        let dialed = tls::dial(self.world.server().agents, &ca, identity).await;
        // With TLS 1.3 the client learns of the refusal by its first read.
        if let Ok(mut stream) = dialed {
            let mut bytes = [0; 64];
            let read = within("a refusal", stream.read(&mut bytes)).await;
            assert!(read.is_err(), "{read:?}");
        }
    }

    async fn connect(&self, connection: &Connection, values: &[&str]) -> Call {
        let mut headers = vec![("agentid", "agent-1")];
        headers.extend(values.iter().map(|value| ("authorization", *value)));
        connection.call("/AgentService/Connect", &headers).await
    }

    /// Status and message of a call with these values of `authorization`.
    async fn answer(&self, values: &[&str]) -> (String, String) {
        let connection = self.stranger().await;
        let mut call = self.connect(&connection, values).await;
        let headers = call.headers().await.expect("an answer");
        assert!(
            !headers.contains_key("serverid"),
            "a refused agent sees no server id"
        );
        grpc_status(&headers)
    }

    fn value(&self, series: &str) -> f64 {
        lanes::value(&self.world, series)
    }
}

/// Checks have upstream's order, and refusals have upstream's text.
///
/// Upstream (configuration): Tokens are accepted only for the account and audience; each refusal has upstream's text.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_token_gets_upstreams_error_text() {
    let tokens = Tokens::start(&[]).await;
    let good = format!("Bearer {}", tokens.api.issue(AGENT, AUDIENCE, ""));
    let of = |claims: serde_json::Value| format!("Bearer {}", api::token(&claims));
    let in_time = api::in_seconds(600);
    let validate = "Failed to validate authentication token, err:lookup failed: ";
    // Upstream passes on the words of the API server, to callers that have proved nothing.
    let generic = "the Kubernetes API did not accept the review; the server's log says why";
    let claims = |sub: &str, audience: &str, expiry: u64| {
        vec![of(json!({"sub": sub, "aud": audience, "exp": expiry}))]
    };
    let account = |namespace: &str, name: &str| {
        let subject = format!("system:serviceaccount:{namespace}:{name}");
        claims(&subject, AUDIENCE, in_time)
    };
    let invalid = format!("{validate}service account jwt not valid");
    let namespace = "incoming request from \"a\" namespace. Expected \"kube-system\"";
    let name = "incoming request from \"a\" service account. Expected \"konnectivity-agent\"";
    let absent = "Authentication context was not found in metadata".to_owned();
    let twice = "too many (2) tokens are received".to_owned();
    let scheme = "received token does not have \"Bearer \" prefix".to_owned();
    for (values, text) in [
        (vec![], absent),
        (vec![good.clone(), good.clone()], twice),
        (vec![good.replace("Bearer", "bearer")], scheme),
        (vec!["Bearer opaque".to_owned()], invalid.clone()),
        (claims(AGENT, AUDIENCE, 1_000_000), invalid.clone()),
        (claims(AGENT, "other", in_time), invalid),
        (
            account("a", "konnectivity-agent"),
            format!("{validate}{namespace}"),
        ),
        (account("kube-system", "a"), format!("{validate}{name}")),
        // A token of another cluster: its claims are right, but its signature is not.
        (
            claims(AGENT, AUDIENCE, in_time),
            format!("{validate}{generic}"),
        ),
    ] {
        let values: Vec<&str> = values.iter().map(String::as_str).collect();
        let (status, message) = tokens.answer(&values).await;
        assert_eq!((status.as_str(), message), ("2", text), "{values:?}");
    }
    tokens
        .api
        .set_fault(Some(Fault::Answer(500, Bytes::from_static(b"no"))));
    let (status, message) = tokens.answer(&[&good]).await;
    let text = format!(
        "Failed to validate authentication token, err:Failed to authenticate request. err:{generic}"
    );
    assert_eq!((status.as_str(), message), ("2", text));
    assert_eq!(tokens.world.server().links(), 0);
    for (series, expected) in [
        ("adit_token_reviews_total{result=\"denied\"}", 1.0),
        ("adit_token_reviews_total{result=\"error\"}", 1.0),
        ("adit_token_reviews_in_flight", 0.0),
        ("adit_agents_refused_total{reason=\"token\"}", 9.0),
        ("adit_agents_refused_total{reason=\"not_reviewed\"}", 1.0),
        (
            "konnectivity_network_proxy_server_ready_backend_connections",
            0.0,
        ),
    ] {
        assert_eq!(tokens.value(series), expected, "{series}");
    }
}

/// A native agent needs only a token and a CA. It has lanes, as an agent with a certificate does.
///
/// Upstream (configuration): Tokens are accepted only for the account and audience; each refusal has upstream's text.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_with_a_token_serves_and_has_lanes() {
    let (target, _echo) = targets::local_echo().await;
    let tokens = Tokens::start(&[]).await;
    let _agent = tokens.agent("agent-1", "node-1", &[]).await;
    tokens.world.links(1).await;
    lanes::warm(&tokens.world).await;
    tokens.world.assert_serves(&target).await;
    assert!(tokens.value("adit_tunnels_opened_total{path=\"lane\"}") >= 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_under_review_is_neither_counted_nor_ready_and_leaves_nothing_behind() {
    let tokens = Tokens::start(&[]).await;
    let good = format!("Bearer {}", tokens.api.issue(AGENT, AUDIENCE, ""));
    tokens.api.set_fault(Some(Fault::Silence));
    let connection = tokens.stranger().await;
    let call = tokens.connect(&connection, &[&good]).await;
    tokens
        .world
        .server_metric("adit_token_reviews_in_flight", 1.0)
        .await;
    assert_eq!(tokens.world.server().links(), 0);
    assert_eq!(
        tokens.value("konnectivity_network_proxy_server_ready_backend_connections"),
        0.0
    );
    // The stream ends, and the connection stays open.
    drop(call);
    tokens
        .world
        .server_metric("adit_token_reviews_in_flight", 0.0)
        .await;
    let api = tokens.api.clone();
    until("the API server's client to leave", || {
        api.state.lock().unwrap().at_once.0 == 0
    })
    .await;
    tokens.api.set_fault(None);
    let mut call = tokens.connect(&connection, &[&good]).await;
    let headers = call.headers().await.expect("an answer");
    assert!(headers.contains_key("serverid"));
    tokens.world.links(1).await;
}

/// The API server restarts beside its own proxy: open links stay, and agents that reconnect have to wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn links_stay_while_the_api_server_is_down_and_new_ones_wait_for_it() {
    let (target, _echo) = targets::local_echo().await;
    let mut tokens = Tokens::start(&[]).await;
    let _agent = tokens.agent("agent-1", "node-1", &[]).await;
    tokens.world.links(1).await;
    tokens
        .api
        .set_fault(Some(Fault::Answer(503, Bytes::from_static(b"starting"))));
    tokens.world.assert_serves(&target).await;
    let refused = "adit_agents_refused_total{reason=\"not_reviewed\"}";
    tokens.world.restart_server().await;
    until("a refused agent", || tokens.value(refused) >= 2.0).await;
    assert_eq!(tokens.world.server().links(), 0);
    tokens.api.set_fault(None);
    tokens.world.links(1).await;
    tokens.world.assert_serves(&target).await;
}

/// A stolen token must not take over the agent id of every node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_of_another_node_never_takes_the_dials_of_an_agent_id() {
    let (target, _echo) = targets::local_echo().await;
    let tokens = Tokens::start(&[]).await;
    let owner = tokens.agent("agent-1", "node-1", &[]).await;
    tokens.world.links(1).await;
    let stolen = format!("Bearer {}", tokens.api.issue(AGENT, AUDIENCE, "node-2"));
    let connection = tokens.stranger().await;
    let mut intruder = tokens.connect(&connection, &[&stolen]).await;
    assert!(intruder.headers().await.unwrap().contains_key("serverid"));
    tokens.world.links(2).await;
    // The intruder answers no dial, so a dial to it would hang.
    for _dial in 0..10 {
        tokens.world.assert_serves(&target).await;
    }
    // The pod that replaces the owner's pod has another token of the same node.
    let replaced = tokens.agent("agent-1", "node-1", &[]).await;
    tokens.world.links(3).await;
    within("the owner's end", owner.stop()).await;
    for _dial in 0..10 {
        tokens.world.assert_serves(&target).await;
    }
    drop(replaced);
}

/// A grant can name accounts and nodes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_claims_only_what_is_granted_to_its_node() {
    let tokens =
        Tokens::start(&["--agent-grant=serviceaccount=kube-system/konnectivity-agent:id={node}"])
            .await;
    let of_node = format!("Bearer {}", tokens.api.issue(AGENT, AUDIENCE, "agent-1"));
    let of_other = format!("Bearer {}", tokens.api.issue(AGENT, AUDIENCE, "agent-2"));
    let (status, message) = tokens.answer(&[&of_other]).await;
    assert_eq!(status, "7", "{message}");
    let owner = "serviceaccount=kube-system/konnectivity-agent node=agent-2";
    assert_eq!(
        message,
        format!("agent id \"agent-1\" is not granted to {owner}")
    );
    let connection = tokens.stranger().await;
    let mut call = tokens.connect(&connection, &[&of_node]).await;
    assert!(call.headers().await.unwrap().contains_key("serverid"));
    tokens.world.links(1).await;
}

/// A server accepts either proof during a migration from certificates to tokens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_presented_proof_must_be_valid_where_either_suffices() {
    let (target, _echo) = targets::local_echo().await;
    let tokens = Tokens::start_with(&[]).await;
    let by_certificate = tokens.world.agent("agent-1", &[]).await;
    let by_token = tokens.agent("agent-2", "node-2", &[]).await;
    let file = format!("--token-path={}", tokens.token_file("node-3").display());
    let by_both = tokens.world.agent("agent-3", &[&file]).await;
    tokens.world.links(3).await;
    tokens.world.assert_serves(&target).await;
    let owners = tokens.world.server().lanes().into_iter();
    let mut owners: Vec<String> = owners
        .map(|pool| pool.identity().owner().expect("an owner").to_string())
        .collect();
    owners.sort();
    assert_eq!(owners.len(), 3, "{owners:?}");
    assert!(owners[0].contains("CN=agent"), "{owners:?}");
    assert!(
        owners[1].ends_with("node=node-2") && owners[2].ends_with("node=node-3"),
        "{owners:?}"
    );
    // An invalid token is refused, even beside a valid certificate.
    let connection = Connection::agent(&tokens.world).await;
    let mut call = tokens.connect(&connection, &["Bearer a.b.c"]).await;
    assert_eq!(call.headers().await.unwrap()["grpc-status"], "2");
    // A certificate of another CA fails the handshake.
    let other = World::start(&[]).await;
    let (cert, key) = (other.files.cert("agent"), other.files.key("agent"));
    tokens.assert_no_handshake(Some((&cert, &key))).await;
    // Without a certificate and a token there is no link.
    let (status, message) = tokens.answer(&[]).await;
    assert_eq!(
        (status.as_str(), message.as_str()),
        ("2", "Authentication context was not found in metadata")
    );
    drop((by_certificate, by_token, by_both));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_proof_is_refused_where_both_are_required() {
    let tokens = Tokens::start_with(&["--agent-proof=both"]).await;
    let connection = Connection::agent(&tokens.world).await;
    let mut call = tokens.connect(&connection, &[]).await;
    let headers = call.headers().await.unwrap();
    assert_eq!(
        headers["grpc-message"],
        "Authentication context was not found in metadata"
    );
    tokens.assert_no_handshake(None).await;
    let file = format!("--token-path={}", tokens.token_file("node-1").display());
    let _agent = tokens.world.agent("agent-1", &[&file]).await;
    tokens.world.links(1).await;
}

/// A lane without a certificate authenticates with its link's secret, and only to a link without a certificate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lane_without_a_certificate_cannot_bind_to_a_link_with_one() {
    let tokens = Tokens::start_with(&[]).await;
    let connection = Connection::agent(&tokens.world).await;
    let (_link, grant) =
        crate::support::stub_lane::link(&tokens.world, &connection, "agent-1").await;
    let mut lane = Stub::nobody(tokens.world.server().agents, &tokens.world).await;
    assert!(
        !lane.bind(&grant).await,
        "it has the secret, and no certificate"
    );
    let mut lane = Stub::connect(&tokens.world, "agent").await;
    assert!(lane.bind(&grant).await);
}

/// A token identifies an agent in the rules for node-to-control-plane tunnels.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_with_a_token_opens_tunnels_to_the_control_plane() {
    let (port, _target) = targets::echo().await;
    let destination = format!("127.0.0.1:{port}");
    let tokens = Tokens::start(&[&format!("--allowed-destination={destination}")]).await;
    let target = format!("--target=0:{destination}");
    let agent = tokens.agent("agent-1", "node-1", &[&target]).await;
    tokens.world.links(1).await;
    let mut stream = node::connect(agent.target_listeners[0]).await;
    node::echo(&mut stream, b"from a pod").await;
}
