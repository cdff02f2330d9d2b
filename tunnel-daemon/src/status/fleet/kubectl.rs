//! Asks the servers and agents of a cluster by `kubectl exec`, under the rights of the user. Needs nothing in the cluster: no
//! listener, no account. What pods say is untrusted, so its size and time are bounded.

use std::ffi::OsString;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail};
use futures_util::StreamExt as _;
use futures_util::stream;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::Command;
use tokio::runtime::Builder;
use tokio::time::{Instant, timeout};

use adit_config::KubectlOptions;

use super::super::client::ANSWER_BYTES_MAX;
use super::super::text::clean;
use super::answer::{self, Answer};
use super::model::Remark;

/// Pods that are asked at once: each is a process of kubectl, of some 50 MB.
const AT_ONCE: usize = 8;
/// Time limit of each call of kubectl. A busy API server takes seconds.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time for all pods: thousands that do not answer would take hours.
const ALL_WITHIN: Duration = Duration::from_secs(5 * 60);
/// Most bytes of error output that are kept.
const ERRORS_MAX: u64 = 8 << 10;
/// Longest text about a failure.
const WHY_MAX: usize = 300;
/// Pods that have ended have no process to ask.
const NOT_ENDED: &str = "status.phase!=Succeeded,status.phase!=Failed";
/// A line for each pod. The whole objects would be megabytes.
const PODS: &str = r#"jsonpath={range .items[*]}{.metadata.namespace}{" "}{.metadata.name}{" "}{.status.phase}{"\n"}{end}"#;

/// Asks all pods that the options select.
///
/// # Errors
/// kubectl cannot list pods, or there are none.
pub(super) fn ask(options: &KubectlOptions) -> anyhow::Result<Vec<Result<Answer, Remark>>> {
    let kubectl = Kubectl::of(options);
    let runtime = Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let pods = kubectl.pods(&options.selector).await?;
        let end = Instant::now() + ALL_WITHIN;
        let asked = pods.iter().map(|pod| kubectl.ask_before(end, pod));
        let answers: Vec<_> = stream::iter(asked).buffered(AT_ONCE).collect().await;
        Ok(answers.into_iter().flatten().collect())
    })
}

/// How to call kubectl.
struct Kubectl {
    program: OsString,
    /// Arguments of each call.
    access: Vec<String>,
    container: Option<String>,
    patience: Duration,
}

#[derive(PartialEq, Eq, Debug)]
struct Pod {
    namespace: String,
    name: String,
    phase: String,
}

impl Kubectl {
    fn of(options: &KubectlOptions) -> Self {
        let flags = [
            ("kubeconfig", &options.kubeconfig),
            ("context", &options.context),
            ("namespace", &options.namespace),
        ];
        let given = flags.into_iter();
        let given = given.filter_map(|(flag, value)| Some(format!("--{flag}={}", value.as_ref()?)));
        Self {
            program: "kubectl".into(),
            access: given.collect(),
            container: options.container.clone(),
            patience: PATIENCE,
        }
    }

    async fn pods(&self, selector: &str) -> anyhow::Result<Vec<Pod>> {
        let (selector, phases) = (
            format!("--selector={selector}"),
            format!("--field-selector={NOT_ENDED}"),
        );
        let output = format!("--output={PODS}");
        let listed = self
            .output(&["get", "pods", &selector, &phases, &output])
            .await;
        let listed = listed
            .map_err(anyhow::Error::msg)
            .context("kubectl get pods")?;
        let pods: Vec<Pod> = listed.lines().filter_map(Pod::parse).collect();
        if pods.is_empty() {
            bail!("no pod has the labels of {selector}: give --namespace, --selector or --context");
        }
        Ok(pods)
    }

    /// Asks a pod, unless the time for all of them is over.
    async fn ask_before(&self, end: Instant, pod: &Pod) -> Vec<Result<Answer, Remark>> {
        if Instant::now() < end {
            return self.ask(pod).await;
        }
        let name = format!("{}/{}", pod.namespace, pod.name);
        let seconds = ALL_WITHIN.as_secs();
        let text = format!("was not asked: the pods before it took more than {seconds} s");
        vec![Err(Remark::new(name, text))]
    }

    async fn ask(&self, pod: &Pod) -> Vec<Result<Answer, Remark>> {
        let name = format!("{}/{}", pod.namespace, pod.name);
        if pod.phase != "Running" {
            let text = format!("gives no answer: its phase is {}", pod.phase);
            return vec![Err(Remark::new(name, text))];
        }
        let of = format!("pod/{}", pod.name);
        let container = self.container.as_ref();
        let container = container.map(|container| format!("--container={container}"));
        let mut args = vec!["exec", &of];
        args.extend(container.as_deref());
        args.extend(["--", "adit", "status", "--json"]);
        match self.output(&args).await {
            Ok(text) => answer::parse(&name, &text, 1),
            Err(why) => vec![Err(Remark::new(name, format!("gives no answer: {why}")))],
        }
    }

    /// Runs kubectl, and returns what it writes. A call that is too slow or writes too much is killed.
    async fn output(&self, args: &[&str]) -> Result<String, String> {
        let mut command = Command::new(&self.program);
        command.args(&self.access).args(args);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        command.stderr(Stdio::piped()).kill_on_drop(true);
        let child = command.spawn();
        let mut child = child.map_err(|error| {
            format!("cannot run kubectl: {error}; install it, or add its folder to PATH")
        })?;
        let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
            return Err("kubectl has no output".to_owned());
        };
        let ended = async {
            let (out, errors) = tokio::try_join!(all(stdout), first(stderr))?;
            let status = child.wait().await.map_err(|error| error.to_string())?;
            match status.success() {
                true => Ok(out),
                false => Err(reason(&errors).unwrap_or_else(|| format!("kubectl: {status}"))),
            }
        };
        let seconds = self.patience.as_secs();
        let ended = timeout(self.patience, ended).await;
        ended.unwrap_or_else(|_elapsed| Err(format!("kubectl took more than {seconds} s")))
    }
}

impl Pod {
    /// A line of [`PODS`].
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split(' ').map(str::to_owned);
        Some(Self {
            namespace: words.next()?,
            name: words.next()?,
            phase: words.next()?,
        })
    }
}

/// Everything from a pipe.
///
/// # Errors
/// It is too much, or no text.
async fn all(pipe: impl AsyncRead + Unpin) -> Result<String, String> {
    let mut bytes = Vec::new();
    let mut most = pipe.take(ANSWER_BYTES_MAX + 1);
    let read = most.read_to_end(&mut bytes).await;
    read.map_err(|error| error.to_string())?;
    if bytes.len() as u64 > ANSWER_BYTES_MAX {
        let most = ANSWER_BYTES_MAX >> 20;
        return Err(format!("it wrote more than {most} MiB"));
    }
    String::from_utf8(bytes).map_err(|_not_text| "it wrote no text".to_owned())
}

/// The first bytes from a pipe; reads the others, too, so that the writer does not wait.
async fn first(mut pipe: impl AsyncRead + Unpin) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let mut most = (&mut pipe).take(ERRORS_MAX);
    let read = most.read_to_end(&mut bytes).await;
    read.map_err(|error| error.to_string())?;
    let rest = tokio::io::copy(&mut pipe, &mut tokio::io::sink()).await;
    rest.map_err(|error| error.to_string())?;
    Ok(bytes)
}

/// What the error output says, without lines that kubectl always writes. `None`: nothing.
fn reason(errors: &[u8]) -> Option<String> {
    const USUAL: [&str; 2] = ["Defaulted container", "command terminated with exit code"];
    let errors = String::from_utf8_lossy(errors);
    let lines = errors.lines().map(str::trim);
    let telling =
        lines.filter(|line| !line.is_empty() && !USUAL.iter().any(|usual| line.starts_with(usual)));
    let telling = telling.collect::<Vec<_>>().join("; ");
    (!telling.is_empty()).then(|| clean(&telling, WHY_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A kubectl that is a shell script.
    fn kubectl(script: &str, patience: Duration) -> Kubectl {
        Kubectl {
            program: "/bin/sh".into(),
            access: ["-c", script, "kubectl"].map(str::to_owned).to_vec(),
            container: Some("c".to_owned()),
            patience,
        }
    }

    fn pod(phase: &str) -> Pod {
        Pod::parse(&format!("n a {phase}")).unwrap()
    }

    /// What is said about a pod that does not answer.
    async fn fault(script: &str, patience: Duration) -> String {
        let answers = kubectl(script, patience).ask(&pod("Running")).await;
        let [Err(remark)] = &answers[..] else {
            panic!("{answers:?}");
        };
        assert_eq!(remark.source, "n/a");
        remark.text.clone()
    }

    #[tokio::test]
    async fn a_pod_that_does_not_answer_is_named_with_the_reason() {
        for (script, expected) in [
            (
                "echo 'Defaulted container \"c\"' >&2; printf 'no \\033[2J rights\\n\\nhere' >&2; exit 1",
                "gives no answer: no ?[2J rights; here",
            ),
            ("exit 7", "gives no answer: kubectl: exit status: 7"),
            (
                "echo 'command terminated with exit code 1' >&2; exit 1",
                "gives no answer: kubectl: exit status: 1",
            ),
            ("printf '\\377'", "gives no answer: it wrote no text"),
            ("yes", "gives no answer: it wrote more than 32 MiB"),
            (":", "is empty, and no answer of adit status --json"),
        ] {
            assert_eq!(fault(script, PATIENCE).await, expected, "{script}");
        }
    }

    #[tokio::test]
    async fn a_kubectl_that_hangs_is_killed_at_the_time_limit() {
        let text = fault("exec sleep 3600", Duration::from_millis(20)).await;
        assert_eq!(text, "gives no answer: kubectl took more than 0 s");
    }

    #[tokio::test]
    async fn errors_are_read_to_their_end_and_kept_in_part() {
        let script = "head -c 1000000 /dev/zero | tr '\\0' x >&2; exit 1";
        let text = fault(script, PATIENCE).await;
        assert!(text.ends_with("xx~") && text.len() < 400, "{text}");
    }

    #[tokio::test]
    async fn pods_are_asked_by_name_and_container_and_only_if_they_run() {
        let echo = kubectl("echo \"$@\" >&2; exit 1", PATIENCE);
        let said = echo.ask(&pod("Running")).await.remove(0).unwrap_err();
        let expected = "gives no answer: exec pod/a --container=c -- adit status --json";
        assert_eq!(said.text, expected);
        let said = echo.ask(&pod("Pending")).await.remove(0).unwrap_err();
        assert_eq!(said.text, "gives no answer: its phase is Pending");
    }

    #[tokio::test]
    async fn no_pods_and_no_rights_are_errors() {
        let none = kubectl(":", PATIENCE).pods("a=b").await.unwrap_err();
        assert!(none.to_string().contains("--selector=a=b"), "{none}");
        let forbidden = kubectl("echo Forbidden >&2; exit 1", PATIENCE);
        let error = forbidden.pods("a=b").await.unwrap_err();
        assert_eq!(format!("{error:#}"), "kubectl get pods: Forbidden");
        let absent = Kubectl {
            program: "/nonexistent/kubectl".into(),
            ..kubectl("", PATIENCE)
        };
        let error = format!("{:#}", absent.pods("a=b").await.unwrap_err());
        assert!(
            error.contains("cannot run kubectl: No such file"),
            "{error}"
        );
    }
}
