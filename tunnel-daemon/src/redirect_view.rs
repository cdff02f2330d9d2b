//! State of the redirect, for `/readyz?verbose`, the admin socket and metrics.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::status::model::{RedirectFile, RedirectNamespaces, RedirectOthers, RedirectStatus};
use adit_host::cgroup::{PART_OF_HOST, WHOLE_HOST};
use adit_telemetry::AditMetrics;
use adit_telemetry::labels::{
    Label as _, NetnsHelperState, NetnsState, RedirectState, ReloadResult,
};

/// Most namespaces named in an answer of the health port.
const NAMED_MAX: usize = 8;

/// The redirect writes this state; the health port and the admin socket read it.
pub(crate) struct RedirectView {
    now: Mutex<Option<RedirectStatus>>,
    /// The line about the packet filter's listener, if there is one.
    transparent: OnceLock<String>,
    metrics: AditMetrics,
}

impl RedirectView {
    /// Before any redirect has started.
    pub(crate) fn new(metrics: &AditMetrics) -> Self {
        Self {
            now: Mutex::default(),
            transparent: OnceLock::new(),
            metrics: metrics.clone(),
        }
    }

    fn now(&self) -> MutexGuard<'_, Option<RedirectStatus>> {
        // No writer panics halfway through a change, so a poisoned lock holds a valid state.
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut RedirectStatus)) {
        change(self.now().get_or_insert_default());
    }

    /// Notes the packet filter's listener. `no_tproxy`: why TPROXY rules cannot lead to it.
    pub(crate) fn transparent(&self, at: SocketAddr, no_tproxy: Option<&io::Error>) {
        self.transparent.get_or_init(|| match no_tproxy {
            None => format!("[+]transparent {at}\n"),
            Some(why) => format!(
                "[-]transparent {at}: REDIRECT rules can lead to it, TPROXY rules cannot without CAP_NET_ADMIN: {why}\n"
            ),
        });
    }

    /// Programs are attached, and this number of rules is in force.
    pub(crate) fn active(&self, cgroup: &Path, rules: usize) {
        self.metrics.redirect().set_state(RedirectState::Active);
        self.change(|now| {
            now.state = RedirectState::Active.as_str().to_owned();
            now.cgroup = cgroup.display().to_string();
        });
        self.rules(rules, 1);
    }

    /// The cgroup mount looks like the host's root, but shows only a part of the host.
    pub(crate) fn part_of_host(&self) {
        self.change(|now| now.part_of_host = true);
    }

    /// Programs of other owners at the same hooks.
    pub(crate) fn others(&self, others: RedirectOthers) {
        self.change(|now| now.others = Some(others));
    }

    /// Nothing is redirected, for this reason.
    pub(crate) fn missing(&self, why: &str) {
        self.metrics.redirect().set_state(RedirectState::Missing);
        self.change(|now| {
            now.state = RedirectState::Missing.as_str().to_owned();
            now.reason = Some(why.replace('\n', " "));
        });
    }

    /// Number of active rules, and the generation of the rule set.
    pub(crate) fn rules(&self, rules: usize, set: u64) {
        self.metrics.redirect().rules.set(rules);
        self.change(|now| {
            (now.rules, now.set) = (rules as u64, set);
        });
    }

    /// The rule file is in force from the start.
    pub(crate) fn file(&self, path: &Path) {
        self.change(|now| {
            now.file = Some(RedirectFile {
                path: path.display().to_string(),
                error: None,
            });
        });
    }

    /// Result of rereading a changed rule file: the number of rules and the generation, or the reason.
    pub(crate) fn reloaded(&self, outcome: Result<(usize, u64), &str>) {
        match outcome {
            Ok((rules, set)) => {
                self.rules(rules, set);
                self.metrics.redirect().reloads.count(ReloadResult::Ok);
            }
            Err(_) => self.metrics.redirect().reloads.count(ReloadResult::Failed),
        }
        self.change(|now| {
            if let Some(file) = &mut now.file {
                file.error = outcome.err().map(|why| why.replace('\n', " "));
            }
        });
    }

    /// State of the helper for other network namespaces.
    pub(crate) fn helper(&self, state: NetnsHelperState, why: Option<String>) {
        self.metrics.redirect().set_helper(state);
        self.change(|now| {
            let namespaces = now.namespaces.get_or_insert_default();
            namespaces.helper = state.as_str().to_owned();
            namespaces.reason = why;
        });
    }

    /// Other network namespaces: captured, failed and over the limit.
    pub(crate) fn namespaces(&self, looked: RedirectNamespaces) {
        let metrics = self.metrics.redirect();
        metrics
            .namespaces
            .of(NetnsState::Captured)
            .set(looked.captured.len());
        metrics
            .namespaces
            .of(NetnsState::Failed)
            .set(looked.failed.len());
        let over = usize::try_from(looked.over_limit).unwrap_or(usize::MAX);
        metrics.namespaces.of(NetnsState::OverLimit).set(over);
        self.change(|now| {
            let before = now.namespaces.take().unwrap_or_default();
            now.namespaces = Some(RedirectNamespaces {
                helper: before.helper,
                reason: before.reason,
                ..looked
            });
        });
    }

    /// The state as the admin socket shows it.
    pub(crate) fn status(&self) -> Option<RedirectStatus> {
        self.now().clone()
    }

    /// Lines for `/readyz?verbose`; empty without a redirect and a transparent listener.
    pub(crate) fn detail(&self) -> String {
        let mut text = self.transparent.get().cloned().unwrap_or_default();
        let now = self.now();
        let Some(now) = &*now else {
            return text;
        };
        if let Some(why) = &now.reason {
            text += &format!("[-]redirect missing: {why}\n");
            return text;
        }
        text += &format!(
            "[+]redirect active: {} rules on {}\n",
            now.rules, now.cgroup
        );
        if now.part_of_host {
            text += &format!(
                "[-]redirect-cgroup {}: {PART_OF_HOST}; {WHOLE_HOST}\n",
                now.cgroup
            );
        }
        if let Some(others) = now.others.as_ref().and_then(RedirectOthers::text) {
            text += &format!("[+]redirect: {others}\n");
        }
        if let Some(RedirectFile { path, error }) = &now.file {
            text += &match error {
                None => format!("[+]redirect-file {path}: set {} is in force\n", now.set),
                Some(why) => format!(
                    "[-]redirect-file {path}: {why}; set {} stays in force\n",
                    now.set
                ),
            };
        }
        if let Some(namespaces) = &now.namespaces {
            let count = namespaces.captured.len();
            text += &match &namespaces.reason {
                None => format!("[+]redirect-netns: {count} other namespaces captured\n"),
                Some(why) => {
                    format!("[-]redirect-netns: {count} other namespaces captured; {why}\n")
                }
            };
            if namespaces.over_limit > 0 {
                text += &format!(
                    "[-]redirect-netns: {} namespaces above the limit are not captured\n",
                    namespaces.over_limit
                );
            }
            if namespaces.look_cut {
                text += "[-]redirect-netns: captured processes above the limit are not scanned\n";
            }
            for failed in namespaces.failed.iter().take(NAMED_MAX) {
                text += &format!("[-]redirect-netns {failed}\n");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_redirect_part_has_a_status_line() {
        let metrics = adit_telemetry::AgentMetrics::new();
        let view = RedirectView::new(metrics.adit());
        assert_eq!((view.detail().as_str(), view.status()), ("", None));
        view.active(Path::new("/cg"), 7);
        assert_eq!(view.detail(), "[+]redirect active: 7 rules on /cg\n");
        view.others(RedirectOthers::default());
        assert_eq!(view.detail(), "[+]redirect active: 7 rules on /cg\n");
        view.others(RedirectOthers {
            count: 2,
            programs: Vec::new(),
            unknown: Some("names unknown: no".to_owned()),
        });
        view.file(Path::new("/rules"));
        view.reloaded(Ok((9, 2)));
        view.reloaded(Err("line 1: no"));
        view.helper(NetnsHelperState::Running, None);
        view.namespaces(RedirectNamespaces {
            captured: vec!["/run/netns/a".to_owned()],
            failed: vec!["/run/netns/b: no".to_owned()],
            over_limit: 3,
            look_cut: true,
            ..RedirectNamespaces::default()
        });
        let lines = view.detail();
        assert_eq!(
            lines.lines().collect::<Vec<_>>(),
            [
                "[+]redirect active: 9 rules on /cg",
                "[+]redirect: other programs at its hooks: 2 (names unknown: no)",
                "[-]redirect-file /rules: line 1: no; set 2 stays in force",
                "[+]redirect-netns: 1 other namespaces captured",
                "[-]redirect-netns: 3 namespaces above the limit are not captured",
                "[-]redirect-netns: captured processes above the limit are not scanned",
                "[-]redirect-netns /run/netns/b: no",
            ]
        );
        view.helper(NetnsHelperState::Ended, Some("it ended".to_owned()));
        assert!(
            view.detail()
                .contains("1 other namespaces captured; it ended")
        );
        view.part_of_host();
        let said = format!("\n[-]redirect-cgroup /cg: {PART_OF_HOST}; {WHOLE_HOST}\n");
        assert!(view.detail().contains(&said), "{}", view.detail());
        view.missing("no\ncgroup");
        assert_eq!(view.detail(), "[-]redirect missing: no cgroup\n");
    }

    #[test]
    fn the_transparent_listener_has_a_line_with_and_without_a_redirect() {
        let metrics = adit_telemetry::AgentMetrics::new();
        let at = "127.0.0.1:15001".parse().unwrap();
        let view = RedirectView::new(metrics.adit());
        view.transparent(at, None);
        assert_eq!(view.detail(), "[+]transparent 127.0.0.1:15001\n");
        view.active(Path::new("/cg"), 7);
        assert_eq!(
            view.detail(),
            "[+]transparent 127.0.0.1:15001\n[+]redirect active: 7 rules on /cg\n"
        );
        let view = RedirectView::new(metrics.adit());
        view.transparent(at, Some(&io::ErrorKind::PermissionDenied.into()));
        view.missing("no cgroup");
        assert_eq!(
            view.detail(),
            "[-]transparent 127.0.0.1:15001: REDIRECT rules can lead to it, TPROXY rules cannot without CAP_NET_ADMIN: permission denied\n\
             [-]redirect missing: no cgroup\n"
        );
    }
}
