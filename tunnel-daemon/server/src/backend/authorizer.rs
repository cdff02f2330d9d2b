//! Authorizes agents by deny list, CA and revocation lists: when they link, and again whenever one of these changes.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Release,
};

use adit_core::grant::{DenyError, DenyList};
use adit_core::ids::AgentId;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::followed::{Content, FileError, Followed, POLL, read};
use crate::router::Router;
use adit_net::tasks::Tasks;
use adit_telemetry::AditMetrics;
use adit_telemetry::labels::{AgentRefusal, LinkEnding};
use adit_tls::agent_identity::AgentIdentity;
use adit_tls::cause::TlsCause;
use adit_tls::reload::ReloadableServerTls;
use adit_tls::reread::Reread;
use adit_tunnel::lane::LaneRights;

/// Links checked before the task yields: verifying a signature takes a tenth of a millisecond.
const LINKS_PER_GO: usize = 16;

impl Content for DenyList {
    type Error = DenyError;
    const FLAG: &'static str = "--agent-deny";
    const NAME: &'static str = "deny list";
    const IF_TOO_LONG: &'static str = "write patterns";

    fn parse(text: &str) -> Result<Self, DenyError> {
        Self::parse(text)
    }
}

/// The active deny list and TLS files. Clones share them.
#[derive(Clone, Default)]
pub struct AgentAuthorizer(Arc<InForce>);

#[derive(Default)]
struct InForce {
    denied: Option<Followed<DenyList>>,
    /// TLS of the agent listener.
    tls: Option<Arc<ReloadableServerTls>>,
    /// Number of changes so far.
    changes: AtomicU64,
    changed: Notify,
}

/// Why an agent may not keep its links.
pub(super) enum Denial {
    /// The deny list has this entry.
    Denied(String),
    /// Its certificate was accepted once, and no longer is.
    Certificate(rustls::Error),
}

impl Denial {
    /// The text for the agent.
    pub(super) fn text(&self) -> String {
        match self {
            Self::Denied(entry) => format!("the deny list of this server names {entry}"),
            Self::Certificate(error) => {
                let cause = TlsCause::of(error);
                format!("this server does not accept the agent's certificate any more: {cause}")
            }
        }
    }

    pub(super) fn refusal(&self) -> AgentRefusal {
        match self {
            Self::Denied(_) => AgentRefusal::Denied,
            Self::Certificate(_) => AgentRefusal::Certificate,
        }
    }

    fn ending(&self) -> LinkEnding {
        match self {
            Self::Denied(_) => LinkEnding::Denied,
            Self::Certificate(_) => LinkEnding::Certificate,
        }
    }
}

impl AgentAuthorizer {
    /// Reads the deny list, if there is one. `tls` belongs to the agent listener.
    ///
    /// # Errors
    /// The list cannot be read, or a line of it is wrong.
    pub fn load(denied: Option<&Path>, tls: Arc<ReloadableServerTls>) -> Result<Self, FileError> {
        Ok(Self(Arc::new(InForce {
            denied: denied.map(Followed::load).transpose()?,
            tls: Some(tls),
            ..InForce::default()
        })))
    }

    /// Call it when the agent listener has loaded other TLS files, or the deny list is another.
    pub fn changed(&self) {
        self.0.changes.fetch_add(1, AcqRel);
        self.0.changed.notify_one();
    }

    /// Number of changes so far; agents checked before the last change have to be checked again.
    pub(super) fn changes(&self) -> u64 {
        self.0.changes.load(Acquire)
    }

    /// Why an agent may not keep its links; `None`: it may.
    pub(super) fn denial(&self, agent: &AgentId, identity: &AgentIdentity) -> Option<Denial> {
        let list = self.0.denied.as_ref().map(Followed::content);
        let entry = list
            .as_ref()
            .and_then(|list| list.entry_for(agent, &identity.holders()));
        if let Some(entry) = entry {
            return Some(Denial::Denied(entry.to_owned()));
        }
        let (tls, certificate) = (self.0.tls.as_ref()?, identity.certificate()?);
        let (chain, verified) = certificate.shown();
        tls.verify_client_again(chain, verified)
            .err()
            .map(Denial::Certificate)
    }

    /// Follows changes of the deny list and of the agent listener's TLS files, until `stop`. A denied agent loses links at
    /// once, and tunnels on lanes within seconds. A deny list that cannot be used or read changes nothing, and is logged.
    pub async fn follow(
        self,
        router: Arc<Router>,
        tasks: Tasks,
        metrics: AditMetrics,
        reread: Reread,
        stop: CancellationToken,
    ) {
        // Side by side: a list that blocks must not delay what a new revocation list demands.
        let following = async {
            let lists = async {
                if let Some(denied) = &self.0.denied {
                    denied
                        .follow(&metrics.deny_reloads, &reread, || self.changed())
                        .await;
                }
            };
            tokio::join!(lists, self.follow_links(&router, &tasks, &metrics));
        };
        let _stopped = stop.run_until_cancelled(following).await;
    }

    async fn follow_links(&self, router: &Router, tasks: &Tasks, metrics: &AditMetrics) {
        let mut checked = 0;
        loop {
            let now = self.changes();
            if checked != now && self.check_links(router, tasks, metrics).await {
                checked = now;
            }
            let _poll = tokio::time::timeout(POLL, self.0.changed.notified()).await;
        }
    }

    /// Ends the links of denied agents. False: some could not be ended yet.
    async fn check_links(&self, router: &Router, tasks: &Tasks, metrics: &AditMetrics) -> bool {
        let mut all = true;
        for (at, link) in router.links().into_iter().enumerate() {
            if at > 0 && at.is_multiple_of(LINKS_PER_GO) {
                tokio::task::yield_now().await;
            }
            let Some(denial) = self.denial(&link.info.agent, &link.info.identity) else {
                continue;
            };
            let why = denial.text();
            let Some(end) = link.revoke(why.clone()) else {
                continue;
            };
            let principal = link.info.identity.owner().map_or("", AsRef::as_ref);
            tracing::warn!(agent = %link.info.agent, link = link.id.0, principal, why, "a link is ended");
            match tasks.spawn("end-link", end) {
                Ok(_ending) => metrics.links_ended.count(denial.ending()),
                Err(_full) => all = false,
            }
        }
        all
    }
}

/// The right of one agent to keep tunnels on its lanes: it is not denied, and was not unlinked.
pub(super) struct Rights {
    authorizer: AgentAuthorizer,
    agent: AgentId,
    identity: AgentIdentity,
    are_revoked: AtomicBool,
    /// Number of changes up to which the agent was checked and not denied.
    judged: AtomicU64,
}

impl Rights {
    /// Rights of an agent that is not denied as of `judged` changes.
    pub(super) fn new(
        authorizer: AgentAuthorizer,
        agent: AgentId,
        identity: AgentIdentity,
        judged: u64,
    ) -> Self {
        Self {
            authorizer,
            agent,
            identity,
            are_revoked: AtomicBool::new(false),
            judged: AtomicU64::new(judged),
        }
    }
}

impl LaneRights for Rights {
    fn are_revoked(&self) -> bool {
        let changes = self.authorizer.changes();
        if !self.are_revoked.load(Acquire) && self.judged.load(Acquire) != changes {
            match self.authorizer.denial(&self.agent, &self.identity) {
                Some(_denial) => self.revoke(),
                None => self.judged.store(changes, Release),
            }
        }
        self.are_revoked.load(Acquire)
    }

    fn revoke(&self) {
        self.are_revoked.store(true, Release);
    }
}

impl std::fmt::Debug for Rights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rights")
            .field("agent", &self.agent)
            .field("are_revoked", &self.are_revoked)
            .finish_non_exhaustive()
    }
}

/// Whether a deny list can be used.
///
/// # Errors
/// It cannot be read, or a line of it is wrong.
pub fn check_deny_list(path: &Path) -> Result<(), FileError> {
    read::<DenyList>(path).map(|_list| ())
}
