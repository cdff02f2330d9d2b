//! A server's use of the Kubernetes API: reviews of agents' tokens, and leases.

use std::sync::Arc;

use adit_kube::access::Api;
use adit_kube::leases::collect;
use adit_kube::leases::publish::Publisher;
use adit_kube::reviewer::Reviewer;
use anyhow::Context as _;
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;

use adit_config::plan::ServerPlan;
use adit_net::tasks::Tasks;
use adit_server::backend::AgentAuthenticator;
use adit_telemetry::ServerMetrics;
use adit_telemetry::metrics_lease::ServerLeaseMetrics;
use adit_telemetry::metrics_review::ReviewMetrics;

/// Access to the Kubernetes API, if this server needs it. The failure has upstream's words.
pub(super) async fn kubernetes_api(plan: &ServerPlan) -> anyhow::Result<Option<Arc<Api>>> {
    let of_tokens = plan.agents.tokens.as_ref().map(|tokens| &tokens.api);
    let of_leases = plan.leases.as_ref().map(|leases| &leases.api);
    let Some(source) = of_tokens.or(of_leases) else {
        return Ok(None);
    };
    let api = Api::open(source.clone()).await;
    Ok(Some(
        api.context("failed to load kubernetes client config")?,
    ))
}

/// Publishes this server's lease and collects expired leases. The receiver ends once the lease is withdrawn after `stop`.
pub(super) fn publish_lease(
    plan: &ServerPlan,
    api: Option<Arc<Api>>,
    metrics: &ServerMetrics,
    services: &Tasks,
    counts: watch::Sender<usize>,
    stop: &CancellationToken,
) -> oneshot::Receiver<()> {
    let (withdrawn, receiver) = oneshot::channel();
    let (Some(leases), Some(api)) = (&plan.leases, api) else {
        return receiver;
    };
    let (labels, id) = (leases.labels.clone(), plan.server_id.as_str());
    let publisher = Publisher::new(Arc::clone(&api), leases.scope.clone(), labels, id);
    let stop = stop.clone();
    services.spawn_always("lease", async move {
        publisher.run(stop).await;
        drop(withdrawn);
    });
    let events = Arc::<ServerLeaseMetrics>::clone(metrics.leases());
    let collecting = collect::run(api, leases.scope.clone(), id.to_owned(), events, counts);
    services.spawn_always("expired-leases", collecting);
    receiver
}

/// How agents are authenticated.
pub(super) fn admission(
    plan: &ServerPlan,
    api: Option<&Arc<Api>>,
    metrics: &ServerMetrics,
) -> AgentAuthenticator {
    let (Some(tokens), Some(api)) = (&plan.agents.tokens, api) else {
        return AgentAuthenticator::new(None);
    };
    let events = Arc::<ReviewMetrics>::clone(metrics.reviews());
    let reviewer = Reviewer::new(Arc::clone(api), tokens.policy.clone(), tokens.rate, events);
    AgentAuthenticator::new(Some((reviewer, tokens.proof)))
}
