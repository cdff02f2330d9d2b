//! Adit whose clients are at a server without agents, which asks another one that has the agent.

use std::path::Path;

use adit_perf_plan::Dialect;
use xtask_kit::net::free_port;

use super::{Peer, Route};
use crate::process::Site;
use crate::programs::Programs;

/// Two servers and an agent.
///
/// # Errors
/// The binary cannot be built.
pub(super) fn adit(programs: &Programs) -> anyhow::Result<Peer> {
    let program = programs.adit()?;
    Ok(Peer {
        name: "adit-forward".to_owned(),
        version: format!("{}, through a second server", programs.adit_version()),
        dialects: &[Dialect::Grpc, Dialect::GrpcGo, Dialect::HttpConnect],
        may_span: false,
        start: Box::new(move |site, dialect| start(site, &program, dialect)),
    })
}

fn start(site: &Site, program: &Path, dialect: Dialect) -> anyhow::Result<Route> {
    let mut route = Route::to_far(site)?;
    route.dialect = dialect;
    route.frontend = Some(site.at("s.sock"));
    let address = format!("127.0.0.1:{}", free_port()?);
    let server = |id: &str, frontend: &str, own: &[String]| {
        let mut args = vec![
            "server".to_owned(),
            format!("--server-id={id}"),
            format!("--frontend={frontend}"),
            format!("--peer-cert={}", site.at("peer.pem")),
            format!("--peer-key={}", site.at("peer.key")),
            format!("--peer-ca-cert={}", site.at("peers-ca.pem")),
            "--admin-port=off".to_owned(),
            "--admin-socket=off".to_owned(),
        ];
        args.extend_from_slice(own);
        args
    };
    let unused = format!("grpc=unix:{}", site.at("holder.sock"));
    let holder = server("holder", &unused, &[format!("--peer-bind={address}")]);
    let agent = [
        "agent",
        "--agent-id=agent",
        "--sync-interval=200ms",
        "--sync-interval-cap=1s",
        "--admin-socket=off",
    ];
    let places = [site.near.clone(), site.far.clone()];
    let pair = [holder, agent.map(str::to_owned).to_vec()];
    let [_agents, health, _agent_health] =
        route.start_pair(site, [program, program], &places, pair)?;
    site.wait_until_ready(health)?;
    let health = free_port()?;
    let own = [
        "--no-agents".to_owned(),
        format!("--peer={address}"),
        format!("--health-port={health}"),
    ];
    let protocol = match dialect {
        Dialect::HttpConnect => "http-connect",
        _ => "grpc",
    };
    let frontend = format!("{protocol}=unix:{}", site.at("s.sock"));
    let front = server("front", &frontend, &own);
    route.start(site, "front", &places[0], program, &front)?;
    site.wait_until_ready(health)?;
    Ok(route)
}
