//! A command line's access to the Kubernetes API, checked without asking the API server.

use std::path::Path;

use adit_kube::access::{AccessError, Api, Source};

use tokio::runtime::Builder;

use super::line::{degraded, missing, ok};
use crate::status::model::Capability;
use adit_config::plan::{AgentPlan, ClientsPlan, ServerPlan};
use adit_host::blocking::start_runtime;
use adit_server::backend::check_deny_list;
use adit_server::followed::FileError;
use adit_server::frontend::users::FrontendUsers;

/// Lines about the access of a server to the Kubernetes API, and files that permit or deny.
///
/// # Errors
/// The runtime could not be created.
pub(super) fn of_server(plan: &ServerPlan) -> anyhow::Result<Vec<Capability>> {
    let of_tokens = plan.agents.tokens.as_ref().map(|tokens| &tokens.api);
    let of_leases = plan.leases.as_ref().map(|leases| &leases.api);
    let mut lines = Vec::new();
    if let Some(source) = of_tokens.or(of_leases) {
        lines.push(api(source)?);
    }
    lines.extend(plan.agents.deny.as_ref().map(|path| {
        let checked = check_deny_list(path);
        usable(path, checked).named("agent-deny")
    }));
    lines.extend(users(&plan.clients));
    Ok(lines)
}

/// A line about the users of frontends.
pub(super) fn users(clients: &ClientsPlan) -> Option<Capability> {
    let path = clients.users.as_ref()?;
    let checked = FrontendUsers::load(path).map(|_users| ());
    Some(usable(path, checked).named("frontend-users"))
}

fn usable(path: &Path, checked: Result<(), FileError>) -> Capability {
    match checked {
        Ok(()) => ok(format!("{} can be used", path.display())),
        Err(error) => missing(error.to_string(), "correct the file"),
    }
}

/// A line about the access of an agent to the Kubernetes API.
///
/// # Errors
/// The runtime could not be created.
pub(super) fn of_agent(plan: &AgentPlan) -> anyhow::Result<Option<Capability>> {
    plan.leases
        .as_ref()
        .map(|leases| api(&leases.api))
        .transpose()
}

/// Whether a usable configuration exists. The API server itself may start later.
fn api(source: &Source) -> anyhow::Result<Capability> {
    let runtime = start_runtime(&mut Builder::new_current_thread(), 0, |_error| ())?;
    let opened = runtime.block_on(async {
        let api = Api::open(source.clone()).await?;
        Ok::<_, AccessError>(api.risk().await)
    });
    let line = match opened {
        Ok(None) => ok("its configuration can be used; whether it answers shows later"),
        Ok(Some(risk)) => degraded(
            risk,
            "give a kubeconfig with an https:// server and its certificate-authority",
        ),
        Err(error) => missing(
            error.to_string(),
            "give a kubeconfig that names a cluster, a user, and files that this user may read",
        ),
    };
    Ok(line.named("kubernetes-api"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::model::Verdict;

    #[test]
    fn an_unusable_kubeconfig_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("kubeconfig");
        let source = Source::Kubeconfig(file.clone());
        assert_eq!(api(&source).unwrap().verdict, Verdict::Missing);
        for (cluster, verdict) in [
            (r#"{"server":"https://127.0.0.1:1"}"#, Verdict::Ok),
            (r#"{"server":"http://127.0.0.1:1"}"#, Verdict::Degraded),
            (
                r#"{"server":"https://127.0.0.1:1","insecure-skip-tls-verify":true}"#,
                Verdict::Degraded,
            ),
        ] {
            let content = format!(
                r#"{{"current-context":"a","contexts":[{{"name":"a","context":{{"cluster":"a"}}}}],
                "clusters":[{{"name":"a","cluster":{cluster}}}]}}"#
            );
            std::fs::write(&file, content).unwrap();
            assert_eq!(api(&source).unwrap().verdict, verdict, "{cluster}");
        }
    }
}
