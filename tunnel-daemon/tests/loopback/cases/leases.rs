//! Servers that publish leases, and agents that count them.

use std::time::Duration;

use adit::agent::RunningAgent;
use adit::server::{self, RunningServer};
use adit_testkit::certificates::{ThrowawayCa, Usage};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::api::{FakeApi, Fault};
use crate::support::balancer::Balancer;
use crate::support::node::value;
use crate::support::wait::{until, within, within_for};
use crate::support::world::{World, sample, server_plan};

const KNOWN: &str = "konnectivity_network_proxy_agent_known_server_count";
const HELD: &str = "konnectivity_network_proxy_agent_open_server_connections";
const LISTS: &str =
    "konnectivity_network_proxy_server_lease_list_total{http_status_code=\"200\",reason=\"\"}";

/// Servers of one API server, behind one address.
struct Fleet {
    world: World,
    others: Vec<RunningServer>,
    api: FakeApi,
    balancer: Balancer,
    /// The flag.
    kubeconfig: String,
    _folder: TempDir,
}

impl Fleet {
    /// Starts one server, `s0`.
    async fn start() -> Self {
        let folder = TempDir::new().expect("a folder");
        let api = FakeApi::start().await;
        api.write_kubeconfig(&folder.path().join("kubeconfig"));
        let kubeconfig = format!(
            "--kubeconfig={}",
            folder.path().join("kubeconfig").display()
        );
        let world =
            World::start(&["--enable-lease-controller", "--server-id=s0", &kubeconfig]).await;
        let balancer = Balancer::to(&[world.server().agents]).await;
        Self {
            world,
            others: Vec::new(),
            api,
            balancer,
            kubeconfig,
            _folder: folder,
        }
    }

    /// Starts another server.
    async fn grow(&mut self) {
        let id = format!("s{}", self.others.len() + 1);
        let mut args = self.world.other_args("0", &format!(".{id}"));
        args.retain(|arg| !arg.starts_with("--server-id="));
        args.push(format!("--server-id={id}"));
        let plan = server_plan(&args).expect("flags are right");
        self.others
            .push(server::start(&plan).await.expect("the server starts"));
        let own = self.world.server().agents;
        let all: Vec<_> = self
            .others
            .iter()
            .map(|other| other.agents)
            .chain([own])
            .collect();
        self.balancer.lead_to(&all);
    }

    /// Stops all servers but the first.
    async fn shrink(&mut self) {
        self.balancer.lead_to(&[self.world.server().agents]);
        for other in self.others.drain(..) {
            within("a server's end", other.stop(Some(Duration::ZERO))).await;
        }
    }

    async fn agent(&self, flags: &[&str]) -> RunningAgent {
        let own = ["--count-server-leases", &self.kubeconfig];
        let port = self.balancer.address.port();
        self.world
            .agent_of(port, "agent-1", &[&own, flags].concat())
            .await
    }

    fn leases(&self) -> Vec<String> {
        let state = self.api.state.lock().expect("the state");
        state.leases.all.keys().cloned().collect()
    }

    async fn published(&self, count: usize) {
        until(&format!("{count} leases"), || self.leases().len() == count).await;
    }
}

async fn holds(agent: &RunningAgent, servers: f64) {
    let what = format!("an agent with {servers} servers");
    until(&what, || {
        value(agent, HELD) == servers && value(agent, KNOWN) == servers
    })
    .await;
}

/// 1 -> 3 -> 1, twice, as an operator scales a control plane.
///
/// Upstream (configuration): Agents follow the leases of their servers from one to three servers and back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_follows_the_leases_of_servers() {
    let mut fleet = Fleet::start().await;
    fleet.published(1).await;
    assert_eq!(fleet.leases(), ["konnectivity-proxy-server-s0"]);
    let agent = fleet.agent(&[]).await;
    holds(&agent, 1.0).await;
    for _round in 0..2 {
        fleet.grow().await;
        fleet.grow().await;
        fleet.published(3).await;
        holds(&agent, 3.0).await;
        // A server deletes its lease when it stops, so no agent dials it in vain.
        fleet.shrink().await;
        fleet.published(1).await;
        holds(&agent, 1.0).await;
    }
    // Each server has listed leases, which upstream counts under the same names.
    let text = fleet.world.server().metrics.scrape().text();
    assert!(sample(&text, LISTS) >= Some(1.0), "{text}");
    let watches = "konnectivity_network_proxy_agent_lease_watches_total{http_response_code=\"200\",reason=\"\"}";
    assert!(value(&agent, watches) >= 1.0);
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sync_forever_opens_no_links_once_all_leased_servers_are_linked() {
    let mut fleet = Fleet::start().await;
    fleet.grow().await;
    fleet.published(2).await;
    let agent = fleet.agent(&["--sync-forever"]).await;
    holds(&agent, 2.0).await;
    let calls = || {
        let count = |server: &RunningServer| server.links();
        count(fleet.world.server()) + fleet.others.iter().map(count).sum::<usize>()
    };
    until("all trials to be over", || calls() == 2).await;
    let accepted = |server: &RunningServer| {
        let series = "adit_claimed_identities_total";
        sample(&server.metrics.scrape().text(), series).expect("a series")
    };
    let before = accepted(fleet.world.server()) + accepted(&fleet.others[0]);
    // Ten times the longest pause between two trials.
    let passed = std::time::Instant::now() + Duration::from_secs(2);
    until("the time of ten trials", || {
        std::time::Instant::now() > passed
    })
    .await;
    assert_eq!(
        accepted(fleet.world.server()) + accepted(&fleet.others[0]),
        before
    );
}

/// An agent on a node may start before the API server answers. It may even be the path to that API server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unresponsive_api_server_delays_neither_links_nor_exit() {
    let fleet = Fleet::start().await;
    fleet.published(1).await;
    fleet.api.set_fault(Some(Fault::Silence));
    let agent = within_for(Duration::from_secs(5), "an agent's start", fleet.agent(&[])).await;
    fleet.world.links(1).await;
    until("its link", || value(&agent, HELD) == 1.0).await;
    assert_eq!(value(&agent, KNOWN), 1.0);
    // A server's exit is not delayed by more than two seconds either.
    let Fleet { world, .. } = &fleet;
    let began = std::time::Instant::now();
    within("a server's end", world.server().leave(Some(Duration::ZERO))).await;
    assert!(
        began.elapsed() < Duration::from_secs(4),
        "{:?}",
        began.elapsed()
    );
}

/// Both ends export the expiry of their kubeconfig's client certificate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_certificates_of_kubeconfigs_export_their_expiry() {
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("kubeconfig");
    let issued = ThrowawayCa::new("clients").expect("a CA");
    let issued = issued.issue(Usage::Client, "konnectivity", &[]);
    let issued = issued.expect("a certificate");
    let api = FakeApi::start().await;
    let mut kubeconfig: Value = serde_json::from_str(&api.kubeconfig()).expect("JSON");
    kubeconfig["users"][0]["user"] = json!({
        "client-certificate-data": STANDARD.encode(&issued.cert_pem),
        "client-key-data": STANDARD.encode(&issued.key_pem),
    });
    std::fs::write(&file, kubeconfig.to_string()).expect("a file");
    let flag = format!("--kubeconfig={}", file.display());
    let world = World::start(&["--enable-lease-controller", "--server-id=s0", &flag]).await;
    let agent = world
        .agent("agent-1", &["--count-server-leases", &flag])
        .await;
    let path = file.display();
    let series = format!(
        "adit_certificate_expiry_timestamp_seconds{{file=\"{path}\",kind=\"certificate\"}}"
    );
    let server = &world.server().metrics;
    until("both ends to know", || {
        [server.scrape().text(), agent.metrics.scrape().text()]
            .iter()
            .all(|text| sample(text, &series) > Some(0.0))
    })
    .await;
}

/// The agent itself does not count leases.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_report_the_lease_count_to_agents() {
    let mut fleet = Fleet::start().await;
    fleet.published(1).await;
    fleet.grow().await;
    fleet.published(2).await;
    // The second server's first list contains both leases.
    let text = || fleet.others[0].metrics.scrape().text();
    until("its first look", || sample(&text(), LISTS) >= Some(1.0)).await;
    let port = fleet.balancer.address.port();
    let agent = fleet.world.agent_of(port, "agent-1", &[]).await;
    until("both servers", || value(&agent, HELD) == 2.0).await;
}
