//! Servers and agents of a cluster, started as installations start them.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use adit_testkit::http;
use adit_testkit::scrape::sample;

use crate::cluster::{AGENT, AUDIENCE, Cluster, MadeBy, Mode, Proof, flag};
use crate::go;
use crate::namespace::Node;
use crate::ports;
use crate::process::Process;
use crate::wait::{secs, until};

impl Cluster {
    /// Our server under one of upstream's program names, with the usual flags.
    pub(crate) fn server(&self, called: &str, flags: &[&str]) -> Server {
        self.server_with(called, Proof::Token, flags)
    }

    /// As [`Cluster::server`], for agents that authenticate by `proof`. Only native flags can require both proofs.
    pub(crate) fn server_with(&self, called: &str, proof: Proof, flags: &[&str]) -> Server {
        let ports = [(); 3].map(|()| ports::free());
        let mut args = match proof {
            Proof::Both => self.native_server_args(ports),
            Proof::Token | Proof::Certificate => self.server_args(ports),
        };
        if proof != Proof::Certificate {
            args.extend(self.token_args());
        }
        if proof == Proof::Both {
            args.push("--agent-proof=both".to_owned());
        }
        if proof != Proof::Token {
            args.push(flag("cluster-ca-cert", self.files.ca_file()));
        }
        args.extend(flags.iter().map(|flag| (*flag).to_owned()));
        let program = match proof {
            Proof::Both => PathBuf::from(env!("CARGO_BIN_EXE_adit")),
            Proof::Token | Proof::Certificate => self.adit_as(called),
        };
        self.run_server(called, &program, &args, ports)
    }

    /// A server of either origin with tokens, at these ports (agents, health, administration).
    pub(crate) fn server_at(&self, made_by: MadeBy, ports: [u16; 3], flags: &[String]) -> Server {
        let mut args = self.server_args(ports);
        args.extend(self.token_args());
        args.extend_from_slice(flags);
        let (called, program) = match made_by {
            MadeBy::Adit => ("proxy-server", self.adit_as("proxy-server")),
            MadeBy::Upstream => (
                "upstream-server",
                go::binary(go::Program::Server(go::Release::V0360)),
            ),
        };
        self.run_server(called, &program, &args, ports)
    }

    /// Our server with upstream's flags and tokens, and our own settings by environment.
    pub(crate) fn server_set(
        &self,
        ports: [u16; 3],
        flags: &[String],
        settings: &[(&str, String)],
    ) -> Server {
        let mut args = self.server_args(ports);
        args.extend(self.token_args());
        args.extend_from_slice(flags);
        let set = settings
            .iter()
            .map(|(name, value)| format!("{name}='{value}'"));
        let set: Vec<String> = set.collect();
        let (set, program) = (set.join(" "), self.adit_as("proxy-server"));
        let script = self.path(&format!("proxy-server-{}", ports[0]));
        let text = format!("#!/bin/sh\n{set} exec '{}' \"$@\"\n", program.display());
        fs::write(&script, text).expect("a file");
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&script, mode).expect("it is ours");
        self.run_server("proxy-server", &script, &args, ports)
    }

    /// Our server with native flags and tokens, at these ports.
    pub(crate) fn native_server_at(&self, ports: [u16; 3], flags: &[String]) -> Server {
        let mut args = self.native_server_args(ports);
        args.extend(self.token_args());
        args.extend_from_slice(flags);
        let adit = Path::new(env!("CARGO_BIN_EXE_adit"));
        self.run_server("adit-server", adit, &args, ports)
    }

    /// A symlink to our program under another name.
    pub(crate) fn adit_as(&self, name: &str) -> PathBuf {
        let link = self.path(name);
        if !link.exists() {
            std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_adit"), &link).expect("a link");
        }
        link
    }

    fn run_server(
        &self,
        called: &str,
        program: &Path,
        args: &[String],
        [agents, health, _admin]: [u16; 3],
    ) -> Server {
        let name = format!("{called}-{agents}");
        let process = Process::service(&name, program, args, self.dir.path());
        let server = Server {
            process,
            agents,
            health,
            log: self.path(&format!("{name}.log")),
        };
        until("a server", secs(20), || ask(server.health, "/healthz").ok());
        server
    }

    fn egress(&self) -> String {
        self.path("egress.sock").display().to_string()
    }

    fn server_args(&self, ports: [u16; 3]) -> Vec<String> {
        let mut args = self.shared_server_args(ports);
        args.extend([
            "--logtostderr=true".to_owned(),
            format!("--uds-name={}", self.egress()),
            "--delete-existing-uds-file".to_owned(),
            format!("--mode={}", self.dialect()),
            "--server-port=0".to_owned(),
        ]);
        args
    }

    fn native_server_args(&self, ports: [u16; 3]) -> Vec<String> {
        let frontend = format!("--frontend={}=unix:{}", self.dialect(), self.egress());
        let mut args = vec!["server".to_owned(), frontend];
        args.extend(self.shared_server_args(ports));
        args
    }

    fn dialect(&self) -> &'static str {
        match self.mode {
            Mode::Grpc => "grpc",
            Mode::HttpConnect => "http-connect",
        }
    }

    /// Flags that native and upstream's command lines share.
    fn shared_server_args(&self, [agents, health, admin]: [u16; 3]) -> Vec<String> {
        vec![
            flag("cluster-cert", self.files.cert("server")),
            flag("cluster-key", self.files.key("server")),
            format!("--agent-port={agents}"),
            format!("--admin-port={admin}"),
            format!("--health-port={health}"),
        ]
    }

    fn token_args(&self) -> Vec<String> {
        vec![
            "--agent-namespace=kube-system".to_owned(),
            format!("--agent-service-account={AGENT}"),
            format!("--kubeconfig={}", self.kubeconfig("server").display()),
            format!("--authentication-audience={AUDIENCE}"),
        ]
    }

    /// Flags of our agent for a server at this address, without credentials.
    pub(crate) fn plain_agent_args(&self, host: &str, port: u16) -> Vec<String> {
        vec![
            "agent".to_owned(),
            format!("--proxy-server-host={host}:{port}"),
            format!("--ca-cert={}", self.files.ca_file().display()),
            "--sync-interval=100ms".to_owned(),
            "--sync-interval-cap=500ms".to_owned(),
            "--health-server-port=off".to_owned(),
            "--admin-server-port=off".to_owned(),
        ]
    }

    /// As [`Cluster::plain_agent_args`], with a token file.
    pub(crate) fn agent_args(&self, host: &str, port: u16, token: &Path) -> Vec<String> {
        let mut args = self.plain_agent_args(host, port);
        args.push(format!("--token-path={}", token.display()));
        args
    }

    /// Our agent on a node, with its own credentials.
    pub(crate) fn agent_on(&self, node: &Node, server: &Server, proof: Proof) -> Process {
        let mut args = self.plain_agent_args(&node.host.to_string(), server.agents);
        args.extend(self.proof_args(node, proof));
        self.run_agent(node, "agent", &args)
    }

    /// Runs our agent on a node.
    pub(crate) fn run_agent(&self, node: &Node, name: &str, args: &[String]) -> Process {
        let name = format!("{name}-{}", node.address);
        node.adit(&name, args, self.dir.path())
    }

    /// Credentials of an agent on this node, as flags that both programs have.
    pub(crate) fn proof_args(&self, node: &Node, proof: Proof) -> Vec<String> {
        let mut args = Vec::new();
        if proof != Proof::Certificate {
            let token = self.token("kube-system", AGENT, &["--audience", AUDIENCE]);
            let file = self.token_file(&format!("token-{}", node.address), &token);
            args.push(format!("--token-path={}", file.display()));
        }
        if proof != Proof::Token {
            args.push(flag("agent-cert", self.files.cert("agent")));
            args.push(flag("agent-key", self.files.key("agent")));
        }
        args
    }
}

/// Our server.
pub(crate) struct Server {
    pub(crate) process: Process,
    pub(crate) agents: u16,
    pub(crate) health: u16,
    log: PathBuf,
}

impl Server {
    /// A sample of its metrics; `None` if the series is missing.
    pub(crate) fn value(&self, series: &str) -> Option<f64> {
        sample(&ask(self.health, "/metrics").ok()?, series)
    }

    pub(crate) fn links(&self, count: f64) {
        let links = || {
            let all: f64 = ["adit", "go"]
                .iter()
                .filter_map(|peer| self.value(&format!("adit_links{{peer=\"{peer}\"}}")))
                .sum();
            (all == count).then_some(())
        };
        until(&format!("{count} links"), secs(30), links);
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.log).expect("a log")
    }
}

/// Body of a GET to a port of this host.
pub(crate) fn ask(port: u16, path: &str) -> Result<String, String> {
    ask_at(SocketAddr::from((Ipv4Addr::LOCALHOST, port)), path)
}

/// Body of a GET.
pub(crate) fn ask_at(address: SocketAddr, path: &str) -> Result<String, String> {
    let answer = http::get(address, path).map_err(|error| error.to_string())?;
    match answer.status {
        200 => Ok(answer.body().to_owned()),
        _ => Err(answer.text),
    }
}
