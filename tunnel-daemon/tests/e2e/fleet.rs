//! Three servers with leases and three agents behind a load balancer: rolling restarts, and fleets with upstream's programs.

use std::time::Duration;

use rustix::process::Signal;

use crate::balance::balance;
use crate::cluster::{Cluster, MadeBy, Mode, Proof, flag, programs};
use crate::go;
use crate::load::{Frontend, Load};
use crate::namespace::Node;
use crate::ports;
use crate::process::Process;
use crate::server::Server;
use crate::wait::{secs, until};

const SERVERS: usize = 3;
/// Share of dials that may fail during a restart.
const ONE_IN_A_HUNDRED: f64 = 0.01;

/// Grace period of a pod. In production it is 30 s.
const GRACE_PERIOD: Duration = Duration::from_secs(3);

/// Origin, ports and flags of a server.
struct ServerPlan {
    made_by: MadeBy,
    ports: [u16; 3],
    flags: Vec<String>,
    frontend: Frontend,
}

struct Fleet {
    agents: Vec<Process>,
    servers: Vec<Server>,
    plans: Vec<ServerPlan>,
    node: Node,
    agent_args: Vec<Vec<String>>,
    made_by: [MadeBy; SERVERS],
    cluster: Cluster,
}

impl Fleet {
    /// Starts servers, then agents, of these origins, and waits until each agent has a link to each server.
    fn start(
        test: &str,
        servers: [MadeBy; SERVERS],
        agents: [MadeBy; SERVERS],
        server_flags: &[&str],
        agent_flags: &[&str],
    ) -> Option<Self> {
        let cluster = Cluster::start(programs(test)?, Mode::HttpConnect);
        let mut plans = Vec::new();
        for (number, made_by) in servers.into_iter().enumerate() {
            let ports = [(); 3].map(|()| ports::free());
            let socket = cluster.path(&format!("egress-{number}.sock"));
            let mut flags = vec![
                format!("--uds-name={}", socket.display()),
                format!("--server-id=server-{number}"),
            ];
            flags.extend(server_flags.iter().map(|flag| (*flag).to_owned()));
            let frontend = Frontend {
                socket,
                health: ports[1],
            };
            plans.push(ServerPlan {
                made_by,
                ports,
                flags,
                frontend,
            });
        }
        let running: Vec<Server> = plans
            .iter()
            .map(|plan| cluster.server_at(plan.made_by, plan.ports, &plan.flags))
            .collect();
        let balancer = balance(0, plans.iter().map(|plan| plan.ports[0]).collect());
        let node = Node::start(&cluster, 0);
        let proof = cluster.proof_args(&node, Proof::Token).into_iter();
        // Uses upstream's flag name.
        let proof = proof.map(|flag| flag.replace("--token-path", "--service-account-token-path"));
        let proof: Vec<String> = proof.collect();
        let agent_args = (0..SERVERS).map(|number| {
            let mut args = vec![
                format!("--proxy-server-host={}", node.host),
                format!("--proxy-server-port={balancer}"),
                format!("--ca-cert={}", cluster.files.ca_file().display()),
                format!("--agent-id=agent-{number}"),
                "--sync-interval=200ms".to_owned(),
                "--sync-interval-cap=1s".to_owned(),
                format!("--health-server-port={}", 8200 + number),
                format!("--admin-server-port={}", 8300 + number),
            ];
            args.extend(proof.iter().cloned());
            args.extend(agent_flags.iter().map(|flag| (*flag).to_owned()));
            if agent_flags.contains(&"--count-server-leases") {
                args.push(flag("kubeconfig", cluster.kubeconfig("node")));
            }
            args
        });
        let mut fleet = Self {
            agent_args: agent_args.collect(),
            agents: Vec::new(),
            servers: running,
            plans,
            node,
            made_by: agents,
            cluster,
        };
        for number in 0..SERVERS {
            let agent = fleet.agent(number);
            fleet.agents.push(agent);
        }
        fleet.until_linked();
        Some(fleet)
    }

    fn agent(&self, number: usize) -> Process {
        let program = match self.made_by[number] {
            MadeBy::Adit => self.cluster.adit_as("proxy-agent"),
            MadeBy::Upstream => go::binary(go::Program::Agent(go::Release::V0360)),
        };
        let name = format!("agent-{number}");
        let dir = self.cluster.dir.path();
        self.node
            .run(&name, &program, &self.agent_args[number], dir)
    }

    fn until_linked(&self) {
        for server in &self.servers {
            until("all agents at each server", secs(60), || {
                let ready = "konnectivity_network_proxy_server_ready_backend_connections";
                (server.value(ready)? == 3.0).then_some(())
            });
        }
    }

    fn load(&self) -> Load {
        let frontends = self.plans.iter().map(|plan| plan.frontend.clone());
        Load::start(frontends.collect(), self.node.address)
    }

    fn restart_server(&mut self, number: usize) {
        self.servers[number].process.signal(Signal::TERM);
        self.servers[number].process.wait(secs(60));
        let plan = &self.plans[number];
        self.servers[number] = self
            .cluster
            .server_at(plan.made_by, plan.ports, &plan.flags);
        self.until_linked();
    }

    fn restart_agent(&mut self, number: usize) {
        // Like upstream's agent, ours drains in compat mode until the pod's grace period ends and it is killed.
        self.agents[number].signal(Signal::TERM);
        std::thread::sleep(GRACE_PERIOD);
        self.agents[number].kill();
        self.agents[number] = self.agent(number);
        self.until_linked();
    }

    /// Checks that each server has an agent that reaches the pod.
    fn assert_serves(&self) {
        for plan in &self.plans {
            let answer = crate::load::connect(&plan.frontend.socket, self.node.address);
            let body = answer.as_deref().unwrap_or_default();
            assert!(body.contains(crate::namespace::BODY), "{answer:?}");
        }
    }
}

const ADIT: [MadeBy; SERVERS] = [MadeBy::Adit; SERVERS];
const LEASES: &str = "--enable-lease-controller";
const COUNTED: &str = "--count-server-leases";

/// Restarts all servers or all agents under load, one after the other.
fn rolling_restart(of: &str, restart: impl Fn(&mut Fleet, usize)) {
    let test = format!("rolling {of}");
    let Some(mut fleet) = Fleet::start(&test, ADIT, ADIT, &[LEASES], &[COUNTED]) else {
        return;
    };
    let load = fleet.load();
    for number in 0..SERVERS {
        restart(&mut fleet, number);
        load.go_on();
    }
    load.stop(&format!("rolling restart of {of}"), ONE_IN_A_HUNDRED);
}

#[test]
fn a_rolling_restart_of_servers_fails_one_dial_in_a_hundred_at_most() {
    rolling_restart("servers", Fleet::restart_server);
}

#[test]
fn a_rolling_restart_of_agents_fails_one_dial_in_a_hundred_at_most() {
    rolling_restart("agents", Fleet::restart_agent);
}

#[test]
fn a_restart_of_the_api_server_fails_no_dial() {
    let Some(mut fleet) = Fleet::start("API server", ADIT, ADIT, &[LEASES], &[COUNTED]) else {
        return;
    };
    let load = fleet.load();
    fleet.cluster.restart_api_server();
    load.go_on();
    load.stop("restart of the API server", 0.0);
    fleet.until_linked();
}

/// One of upstream's servers among ours. All of them have leases.
#[test]
fn an_upstream_server_beside_adit_servers_has_all_agents() {
    let servers = [MadeBy::Adit, MadeBy::Upstream, MadeBy::Adit];
    if let Some(fleet) = Fleet::start("mixed servers", servers, ADIT, &[LEASES], &[COUNTED]) {
        fleet.assert_serves();
    }
}

#[test]
fn upstream_agents_beside_adit_agents_link_to_all_servers() {
    let agents = [MadeBy::Upstream, MadeBy::Adit, MadeBy::Upstream];
    if let Some(fleet) = Fleet::start("mixed agents", ADIT, agents, &[LEASES], &[COUNTED]) {
        fleet.assert_serves();
    }
}

/// Agents that ignore leases use the count that servers report.
#[test]
fn dials_succeed_with_leases_only_at_servers() {
    let flags = [LEASES, "--server-count=3"];
    if let Some(fleet) = Fleet::start("leases at servers", ADIT, ADIT, &flags, &[]) {
        fleet.assert_serves();
    }
}

/// Agents that count leases, in a cluster without leases, use the count that servers report with
/// `--server-count-source=max`.
#[test]
fn dials_succeed_with_leases_only_at_agents_and_the_larger_count() {
    let flags = [COUNTED, "--server-count-source=max"];
    let (test, count) = ("leases at agents", ["--server-count=3"]);
    if let Some(fleet) = Fleet::start(test, ADIT, ADIT, &count, &flags) {
        fleet.assert_serves();
    }
}
