//! Which agents are admitted: the server asks the API server about their tokens.

use std::time::Instant;

use adit::agent::{self, RunningAgent};
use adit_config::{Command, parse};
use adit_testkit::certificates::ThrowawayFiles;

use crate::cluster::{AGENT, AUDIENCE, Cluster, Mode};
use crate::jwt::{Signer, claims};
use crate::process::Process;
use crate::wait::{secs, until};

/// Upstream (configuration): Tokens are accepted only for the account and audience; each refusal has upstream's text.
#[test]
fn only_tokens_of_the_account_and_audience_are_accepted() {
    let Some(cluster) = Cluster::of("admission", Mode::Grpc) else {
        return;
    };
    let server = cluster.server("proxy-server", &[]);
    let uid = cluster.account_uid();
    let own = Signer::new(&cluster.files.key("accounts"));
    let elsewhere = ThrowawayFiles::create(&[]).expect("another key");
    let other = Signer::new(&elsewhere.key("server"));
    let audience = ["--audience", AUDIENCE];
    let of = |namespace, account, more: &[&str]| cluster.token(namespace, account, more);
    let other_audience = of("kube-system", AGENT, &["--audience=other"]);
    let other_account = of("kube-system", "other", &audience);
    let other_namespace = of("default", AGENT, &audience);
    let expired = own.sign(&claims(&uid, 1, -100));
    let elsewhere = other.sign(&claims(&uid, 2, 600));
    let gone = own.sign(&claims("gone", 3, 600));
    let invalid = "service account jwt not valid";
    // The server's log has the words of the API server.
    let refused = "lookup failed: the Kubernetes API did not accept the review";
    let cases = [
        ("audience", other_audience, invalid),
        ("account", other_account, "from \"other\" service account"),
        ("namespace", other_namespace, "from \"default\" namespace"),
        ("expired", expired, invalid),
        ("another-cluster", elsewhere, refused),
        ("another-account-of-that-name", gone, refused),
        // Its agent does not even ask.
        ("nothing", String::new(), "holds no token"),
    ];
    for (name, token, why) in &cases {
        let file = cluster.token_file(name, token);
        let args = cluster.agent_args("127.0.0.1", server.agents, &file);
        let adit = std::path::Path::new(env!("CARGO_BIN_EXE_adit"));
        let _agent = Process::service(name, adit, &args, cluster.dir.path());
        // Removes the escapes of logfmt.
        let log = || {
            let log = std::fs::read_to_string(cluster.path(&format!("{name}.log"))).ok()?;
            Some(log.replace("\\\"", "\""))
        };
        until(&format!("{name}: {why}"), secs(20), || {
            log().filter(|log| log.contains(why))
        });
        let is_logged = !token.is_empty() && server.log().contains(token.as_str());
        assert!(!is_logged, "{name}: a token in the log");
    }
    server.links(0.0);
    // The right token is accepted, also when the cluster's own key signed it outside of the API server.
    let file = cluster.token_file("right", &own.sign(&claims(&uid, 4, 600)));
    let args = cluster.agent_args("127.0.0.1", server.agents, &file);
    let adit = std::path::Path::new(env!("CARGO_BIN_EXE_adit"));
    let _agent = Process::service("right", adit, &args, cluster.dir.path());
    server.links(1.0);
}

/// Agents of a thousand nodes reconnect within 30 s after a server's restart, with at most one token review each.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_agents_reconnect_within_30_seconds() {
    const AGENTS: u16 = 1000;
    let Some(cluster) = Cluster::of("a thousand agents", Mode::Grpc) else {
        return;
    };
    let uid = cluster.account_uid();
    let own = Signer::new(&cluster.files.key("accounts"));
    let mut server = cluster.server("proxy-server", &[]);
    let port = server.agents;
    let mut agents = Vec::new();
    for n in 0..AGENTS {
        let name = format!("token-{n}");
        let file = cluster.token_file(&name, &own.sign(&claims(&uid, usize::from(n), 3600)));
        let mut args = vec!["adit".to_owned()];
        args.extend(cluster.agent_args("127.0.0.1", port, &file));
        args.extend([format!("--agent-id=agent-{n}"), "--lanes=0".to_owned()]);
        // Removes the short intervals of tests, so that agents use upstream's defaults as in production.
        args.retain(|arg| !arg.starts_with("--sync-"));
        let parsed =
            parse(args.into_iter().map(Into::into), &|_name| None).expect("flags are right");
        let Command::Agent(plan) = parsed.command else {
            panic!("no agent");
        };
        agents.push(agent::start(&plan).await.expect("the agent starts"));
    }
    server.links(f64::from(AGENTS));
    server.process.kill();
    let began = Instant::now();
    let again = cluster.server("proxy-server", &[&format!("--agent-port={port}")]);
    again.links(f64::from(AGENTS));
    let took = began.elapsed();
    assert!(took < secs(30), "{took:?}");
    let reviews = again.value("adit_token_reviews_total{result=\"ok\"}");
    assert_eq!(reviews, Some(f64::from(AGENTS)), "one review each");
    println!("{AGENTS} agents came back in {took:?}");
    let stops = agents.into_iter().map(RunningAgent::stop);
    futures_util::future::join_all(stops).await;
}
