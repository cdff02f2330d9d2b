//! Requests of the API server into the cluster use the tunnel.

use crate::cluster::{AUDIENCE, Cluster, Mode};
use crate::namespace::{BODY, Node};
use crate::wait::{secs, until};

/// `kubectl get --raw` of a pod that only the agent reaches. The agent authenticates by its token.
fn a_pod_of_the_cluster_is_reached(mode: Mode, called: &str, test: &str) {
    let Some(cluster) = Cluster::of(test, mode) else {
        return;
    };
    let server = cluster.server(called, &[]);
    let node = Node::start(&cluster, 0);
    let raw = [
        "get",
        "--raw",
        "/api/v1/namespaces/default/pods/http:pod-1:8080/proxy/",
    ];
    let body = format!("{BODY}{}", node.address);
    let without = cluster.try_kubectl(&raw, None).expect_err("no agent");
    assert!(!without.contains(BODY), "{without}");
    let bound = [
        "--audience",
        AUDIENCE,
        "--bound-object-kind=Node",
        "--bound-object-name=node-1",
    ];
    let token = cluster.token("kube-system", "konnectivity-agent", &bound);
    let file = cluster.token_file("agent.token", &format!("{token}\n"));
    let args = cluster.agent_args(&node.host.to_string(), server.agents, &file);
    let mut agent = cluster.run_agent(&node, "agent", &args);
    server.links(1.0);
    until("the line that names the agent's account", secs(10), || {
        let known = "serviceaccount=kube-system/konnectivity-agent node=node-1";
        server.log().contains(known).then_some(())
    });
    assert!(!server.log().contains(&token), "a token in the log");
    let answer = until("an answer", secs(30), || {
        cluster.try_kubectl(&raw, None).ok()
    });
    assert_eq!(answer, body);
    until("lanes", secs(30), || {
        let idle = server.value("adit_lanes{state=\"idle\"}")?;
        (idle >= 1.0).then_some(())
    });
    for _request in 0..20 {
        assert_eq!(cluster.kubectl(&raw, None), body);
    }
    assert!(
        server.value("adit_tunnels_opened_total{path=\"lane\"}") >= Some(1.0),
        "tunnels on lanes"
    );
    assert_eq!(
        server.value("adit_token_reviews_total{result=\"ok\"}"),
        Some(1.0)
    );
    agent.kill();
}

/// Upstream (configuration): Tokens are accepted only for the account and audience; each refusal has upstream's text.
#[test]
fn a_pod_of_the_cluster_is_reached_by_grpc() {
    a_pod_of_the_cluster_is_reached(Mode::Grpc, "proxy-server", "grpc");
}

/// Uses the program name of k0s.
#[test]
fn a_pod_of_the_cluster_is_reached_by_http_connect() {
    a_pod_of_the_cluster_is_reached(Mode::HttpConnect, "konnectivity-server", "http-connect");
}
