//! Start order of a cluster's parts on some platforms, and nodes that reach their control plane only through the tunnel.

use std::fs;
use std::path::Path;
use std::time::Instant;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::balance::balance;
use crate::cgroup::Cgroup;
use crate::cluster::{Cluster, MadeBy, Mode, Proof, SERVICE, programs};
use crate::namespace::{BODY, Node};
use crate::ports;
use crate::process::Process;
use crate::server::{Server, ask};
use crate::wait::{secs, until};

/// The credential of a node that has no certificate yet.
const BOOTSTRAP_TOKEN: [&str; 2] = ["abcdef", "0123456789abcdef"];
const PORT_OF_TARGET: u16 = 6443;

fn measured(what: &str, since: Instant) {
    println!("MEASURED {what}: {:.1} s", since.elapsed().as_secs_f64());
}

/// With KKP the server is a sidecar of its API server, and both are behind one Service. Until the API server is ready,
/// agents cannot reach the server, and the server cannot review tokens.
#[test]
fn agents_link_once_their_servers_api_server_is_ready_as_with_kkp() {
    let Some(mut cluster) = Cluster::of("KKP", Mode::Grpc) else {
        return;
    };
    let node = Node::start(&cluster, 0);
    let service = ports::free();
    let mut args = cluster.plain_agent_args(&node.host.to_string(), service);
    args.extend(cluster.proof_args(&node, Proof::Token));
    cluster.stop_api_server();
    // The server starts and is live without the API server.
    let server = cluster.server("proxy-server", &[]);
    let agent = cluster.run_agent(&node, "agent", &args);
    let log = cluster.path(&format!("agent-{}.log", node.address));
    until("an agent that nobody answers", secs(20), || {
        let log = fs::read_to_string(&log).ok()?;
        log.contains("Connection refused").then_some(())
    });
    assert!(ask(server.health, "/healthz").is_ok());
    assert!(
        ask(server.health, "/readyz").is_err(),
        "ready without an agent"
    );
    cluster.start_api_server();
    let ready = Instant::now();
    balance(service, vec![server.agents]);
    server.links(1.0);
    measured("from a ready API server to a link", ready);
    assert!(ask(server.health, "/readyz").is_ok());
    drop(agent);
}

/// With k0s all servers share one virtual address, and agents may start before the servers.
#[test]
fn an_agent_links_to_all_servers_behind_one_address_as_with_k0s() {
    let Some(cluster) = Cluster::of("k0s", Mode::Grpc) else {
        return;
    };
    let node = Node::start(&cluster, 0);
    let places = [(); 3].map(|()| [(); 3].map(|()| ports::free()));
    let address = balance(0, places.iter().map(|ports| ports[0]).collect());
    let mut args = cluster.plain_agent_args(&node.host.to_string(), address);
    args.extend(cluster.proof_args(&node, Proof::Token));
    let _agent = cluster.run_agent(&node, "agent", &args);
    let mut servers: Vec<Server> = Vec::new();
    for (number, ports) in places.into_iter().enumerate() {
        let began = Instant::now();
        let socket = cluster.path(&format!("egress-{number}.sock"));
        let flags = [
            format!("--uds-name={}", socket.display()),
            format!("--server-id=server-{number}"),
            "--server-count=3".to_owned(),
        ];
        servers.push(cluster.server_at(MadeBy::Adit, ports, &flags));
        for server in &servers {
            server.links(1.0);
        }
        measured(&format!("server {} of 3 has the agent", number + 1), began);
    }
}

/// With HyperShift an aggregated API server runs beside kube-apiserver, in a network with its own agent.
#[test]
fn agents_get_the_dials_for_their_identifiers_as_with_hypershift() {
    let Some(cluster) = Cluster::of("HyperShift", Mode::HttpConnect) else {
        return;
    };
    let strategies = "--proxy-strategies=destHost,defaultRoute";
    let server = cluster.server_with("proxy-server", Proof::Certificate, &[strategies]);
    let [worker, beside] = [0, 1].map(|number| Node::start(&cluster, number));
    let identifiers = [
        "default-route=true".to_owned(),
        format!("ipv4={}", beside.address),
    ];
    let _agents: Vec<Process> = [&worker, &beside]
        .into_iter()
        .zip(identifiers)
        .map(|(node, identifiers)| {
            let mut args = cluster.plain_agent_args(&node.host.to_string(), server.agents);
            args.extend(cluster.proof_args(node, Proof::Certificate));
            args.push(format!("--agent-identifiers={identifiers}"));
            cluster.run_agent(node, "agent", &args)
        })
        .collect();
    server.links(2.0);
    for _request in 0..10 {
        for (number, node) in [(1, &worker), (2, &beside)] {
            let raw = format!("/api/v1/namespaces/default/pods/http:pod-{number}:8080/proxy/");
            let answer = cluster.kubectl(&["get", "--raw", &raw], None);
            assert_eq!(answer, format!("{BODY}{}", node.address));
        }
    }
    let ready = "konnectivity_network_proxy_server_ready_backend_connections";
    assert_eq!(server.value(ready), Some(2.0));
}

/// What a node needs to request a certificate: a bootstrap token, and the default rights of its group.
fn allow_bootstrap(cluster: &Cluster) {
    let [id, secret] = BOOTSTRAP_TOKEN;
    let objects = [
        json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": format!("bootstrap-token-{id}"), "namespace": "kube-system"},
            "type": "bootstrap.kubernetes.io/token",
            "stringData": {"token-id": id, "token-secret": secret, "usage-bootstrap-authentication": "true"},
        }),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "bootstrap"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:node-bootstrapper"},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:bootstrappers"}],
        }),
    ];
    let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
    cluster.create(&list);
}

/// A certificate signing request of a kubelet.
fn request(name: &str) -> Value {
    let key = rcgen::KeyPair::generate().expect("a key");
    let mut params = rcgen::CertificateParams::new([]).expect("no names");
    let mut subject = rcgen::DistinguishedName::new();
    subject.push(rcgen::DnType::OrganizationName, "system:nodes");
    subject.push(rcgen::DnType::CommonName, format!("system:node:{name}"));
    params.distinguished_name = subject;
    let pem = params
        .serialize_request(&key)
        .and_then(|request| request.pem())
        .expect("a request");
    json!({
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": {"name": name},
        "spec": {
            "request": Cluster::base64(pem.as_bytes()),
            "signerName": "kubernetes.io/kube-apiserver-client-kubelet",
            "usages": ["digital signature", "client auth"],
        },
    })
}

/// A client in the node's network acts as a kubelet: it creates a certificate signing request, and watches such requests. It
/// retries both.
fn a_node_boots(
    test: &str,
    address: &str,
    leading: impl Fn(&Cluster, Option<&Cgroup>) -> Vec<String>,
    cgroup: Option<Cgroup>,
) {
    let Some(cluster) = Cluster::of(test, Mode::Grpc) else {
        return;
    };
    allow_bootstrap(&cluster);
    let node = Node::start(&cluster, 0);
    let ports = [(); 3].map(|()| ports::free());
    let flags = [format!(
        "--allowed-destination=127.0.0.1:{}",
        cluster.api_port
    )];
    let mut server = cluster.native_server_at(ports, &flags);
    let mut args = cluster.plain_agent_args(&node.host.to_string(), server.agents);
    args.extend(cluster.proof_args(&node, Proof::Token));
    args.extend(leading(&cluster, cgroup.as_ref()));
    let _agent = cluster.run_agent(&node, "agent", &args);
    server.links(1.0);

    let [id, secret] = BOOTSTRAP_TOKEN;
    let access = cluster.access_at(address, &format!("{id}.{secret}"));
    let kubeconfig = cluster.token_file("bootstrap.kubeconfig", &access.to_string());
    let in_cgroup = cgroup.as_ref().map_or_else(String::new, |cgroup| {
        format!("echo $$ > {}/cgroup.procs && ", cgroup.path().display())
    });
    let kubectl = format!(
        "setpriv --pdeathsig=KILL {} --kubeconfig={} --cache-dir={}",
        cluster.program("kubectl").display(),
        kubeconfig.display(),
        cluster.path("cache").display()
    );
    let wait = "sleep 0.2";
    let watch =
        format!("{in_cgroup} while :; do {kubectl} get csr --watch --output=name; {wait}; done");
    let sh = |script: &str| ["-c".to_owned(), script.to_owned()];
    let _watching = node.run("watch", Path::new("sh"), &sh(&watch), cluster.dir.path());
    let seen = |name: &str| {
        let log = fs::read_to_string(cluster.path("watch.log")).unwrap_or_default();
        log.contains(&format!(
            "certificatesigningrequest.certificates.k8s.io/{name}"
        ))
        .then_some(())
    };
    let ask_for = |name: &str| {
        let file = cluster.token_file(name, &request(name).to_string());
        let create = format!("{in_cgroup} {kubectl} create -f {}", file.display());
        let began = Instant::now();
        until("a request for a certificate", secs(60), || {
            let created = node
                .entering()
                .arg("sh")
                .args(sh(&create))
                .output()
                .expect("sh starts");
            created.status.success().then_some(())
        });
        until(
            &format!("{test}: a watch that sees {name}"),
            secs(60),
            || seen(name),
        );
        measured(&format!("{test}: {name} is made and seen"), began);
    };
    ask_for("before");
    server.process.signal(Signal::TERM);
    server.process.wait(secs(60));
    let again = cluster.native_server_at(ports, &flags);
    ask_for("after-a-restart");
    drop(again);
}

#[test]
fn a_node_boots_through_a_port_of_its_agent() {
    a_node_boots(
        "by --target",
        &format!("127.0.0.1:{PORT_OF_TARGET}"),
        |cluster, _| {
            vec![format!(
                "--target={PORT_OF_TARGET}:127.0.0.1:{}",
                cluster.api_port
            )]
        },
        None,
    );
}

#[test]
fn a_node_boots_through_the_service_address() {
    if programs("by the Service's address").is_none() {
        return;
    }
    a_node_boots(
        "by the Service's address",
        &format!("{SERVICE}:443"),
        |cluster, cgroup| {
            let cgroup = cgroup.expect("there is one").path().display();
            vec![
                format!(
                    "--redirect-apiserver={SERVICE}:443=127.0.0.1:{}",
                    cluster.api_port
                ),
                format!("--redirect-cgroup={cgroup}"),
            ]
        },
        Some(Cgroup::new()),
    );
}
