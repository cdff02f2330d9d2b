//! Aggregated APIs whose servers are in the control plane's own network, as HyperShift runs them: an agent beside them announces
//! their addresses, and the agents of workers take everything else.

use serde_json::json;

use crate::cluster::{Cluster, Mode, Proof, flag};
use crate::namespace::{BODY, Node};
use crate::process::Process;
use crate::server::Server;
use crate::wait::{secs, until};

const GROUP: &str = "tunnel.adit.invalid";

/// An agent by HyperShift's command line, with these identifiers.
fn agent(cluster: &Cluster, node: &Node, server: &Server, identifiers: &str) -> Process {
    let files = &cluster.files;
    let args = [
        "--logtostderr=true".to_owned(),
        flag("ca-cert", files.ca_file()),
        flag("agent-cert", files.cert("agent")),
        flag("agent-key", files.key("agent")),
        format!("--proxy-server-host={}", node.host),
        format!("--proxy-server-port={}", server.agents),
        "--health-server-port=2041".to_owned(),
        format!("--agent-identifiers={identifiers}"),
        "--keepalive-time=30s".to_owned(),
        "--probe-interval=5s".to_owned(),
        "--sync-interval=100ms".to_owned(),
        "--sync-interval-cap=500ms".to_owned(),
        "--v=3".to_owned(),
    ];
    let name = format!("agent-{}", node.address);
    let program = cluster.adit_as("proxy-agent");
    node.run(&name, &program, &args, cluster.dir.path())
}

/// Whether the API server finds the group's server.
fn available(cluster: &Cluster) -> String {
    let service = format!("v1.{GROUP}");
    let status = r#"jsonpath={.status.conditions[?(@.type=="Available")].status}"#;
    cluster.kubectl(&["get", "apiservice", &service, "-o", status], None)
}

/// The aggregator asks through the tunnel of the agent that announces the address, while everything else goes to the worker. What
/// an outage of the agent, or of the machine, took comes back with it.
fn an_aggregated_api_of_the_control_plane(mode: Mode, test: &str) {
    let Some(cluster) = Cluster::of(test, mode) else {
        return;
    };
    let flags = ["--proxy-strategies=destHost,defaultRoute"];
    let server = cluster.server_with("proxy-server", Proof::Certificate, &flags);
    let worker = Node::start(&cluster, 0);
    let beside = Node::start(&cluster, 1);
    let _of_worker = agent(&cluster, &worker, &server, "default-route=true");
    let announced = format!("ipv4={}&ipv4=172.31.0.10", beside.address);
    let mut of_control_plane = agent(&cluster, &beside, &server, &announced);
    server.links(2.0);

    // The Service has no selector: HyperShift writes its endpoint.
    let endpoints =
        json!({"endpoints": [{"addresses": [beside.address], "conditions": {"ready": true}}]});
    let patch = format!("--patch={endpoints}");
    let words = [
        "patch",
        "endpointslice",
        "extensions",
        "--type=merge",
        &*patch,
    ];
    cluster.kubectl(&words, None);
    let raw = |path: &str| cluster.try_kubectl(&["get", "--raw", path], None);
    let places = format!("/apis/{GROUP}/v1/places");
    let at = beside.address.to_string();
    let is_served = |what: &str| {
        until(what, secs(90), || {
            raw(&places).ok()?.contains(&at).then_some(())
        });
        until(what, secs(60), || {
            (available(&cluster) == "True").then_some(())
        });
    };
    let worker_is_reached = || {
        let pod = raw("/api/v1/namespaces/default/pods/http:pod-1:8080/proxy/");
        assert_eq!(pod, Ok(format!("{BODY}{}", worker.address)));
    };
    let is_out = |what: &str| {
        until(what, secs(90), || {
            (available(&cluster) == "False").then_some(())
        });
        let refused = raw(&places).expect_err(what);
        assert!(
            refused.contains("unable to handle the request"),
            "{refused}"
        );
        worker_is_reached();
    };
    is_served("an aggregated API of the control plane");
    worker_is_reached();

    of_control_plane.kill();
    is_out("an outage of the agent");
    of_control_plane = agent(&cluster, &beside, &server, &announced);
    is_served("an aggregated API after its agent's return");

    of_control_plane.kill();
    drop(beside);
    is_out("an outage of the API's machine");
    let beside = Node::start(&cluster, 1);
    let _again = agent(&cluster, &beside, &server, &announced);
    is_served("an aggregated API after its machine's return");
    worker_is_reached();
}

#[test]
fn an_aggregated_api_of_the_control_plane_is_served_by_grpc() {
    an_aggregated_api_of_the_control_plane(Mode::Grpc, "aggregated, grpc");
}

#[test]
fn an_aggregated_api_of_the_control_plane_is_served_by_http_connect() {
    an_aggregated_api_of_the_control_plane(Mode::HttpConnect, "aggregated, http-connect");
}
