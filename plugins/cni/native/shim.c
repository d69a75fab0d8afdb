/* GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
 *
 * headcni/shim.py without an interpreter: what the container runtime starts for each call.
 *
 * It sends the call to the daemon and copies the answer. In every other case it executes the Python
 * shim of the same release with the same stdin, and makes no other decision. headcni/shim.py
 * describes the protocol; tests/unit/cni/test_shims.py runs the same cases against both.
 *
 *     RELEASE/bin/headcni      this program, also as headcni-ipam and loopback
 *     RELEASE/python/headcni   the Python shim of the same name
 *     RELEASE/VERSION          what the daemon compares with its own
 */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#define MAGIC "headcni\x01" /* the last byte is the protocol's version */
#define DAEMON "/run/headcni/cni.sock"
#define ANSWER_SECONDS "120"

enum {
    HEADER = sizeof MAGIC - 1 + sizeof(uint32_t),
    LIMIT = 1 << 20,        /* of either message */
    STDIN_LIMIT = 16 << 20, /* the Python shim refuses more */
    HAND_OVER_SECONDS = 5,
    VARIABLES = 1000, /* of the environment */
    HANDED_BACK = 2,  /* as an exit code */
    NOEXEC_SEAL = 8,  /* MFD_NOEXEC_SEAL, which older headers lack */
};

static struct {
    char magic[sizeof MAGIC - 1];
    uint32_t length; /* of the body, in network byte order */
    char body[LIMIT];
} request, answer;

static size_t used;            /* of the request's body */
static char release[PATH_MAX]; /* such as /opt/headcni/releases/0.1.0 */
static const char *program;    /* headcni, headcni-ipam or loopback */

static const char *variable(const char *name, const char *otherwise)
{
    const char *value = getenv(name);
    return value ? value : otherwise;
}

static _Noreturn void fail(const char *what)
{
    printf("{\"cniVersion\": \"1.0.0\", \"code\": 5, \"msg\": \"native shim: %s\", "
           "\"details\": \"%s; is the release in %s complete?\"}\n",
           what, strerror(errno), release);
    exit(1);
}

/* By our own file, not by argv[0]: links may have any name, and `current` may be switched. */
static void find_release(void)
{
    ssize_t length = readlink("/proc/self/exe", release, sizeof release - 1);
    char *slash = length < 0 ? NULL : strrchr(release, '/');
    if (!slash || slash - release < 5 || memcmp(slash - 4, "/bin", 4) != 0)
        fail("it is not in the bin directory of a release");
    slash[-4] = 0;
    slash[1 + strcspn(slash + 1, " ")] = 0; /* at " (deleted)", if it was replaced meanwhile */
    program = slash + 1;
}

/* `outcome` is what we learnt from the daemon: "refused", "silent", or "handed-back" with the
 * connection, which stays open. NULL leaves it to the Python shim to ask the daemon. */
static _Noreturn void run_python(const char *outcome, const char *connection)
{
    char path[PATH_MAX + 32];
    snprintf(path, sizeof path, "%s/python/%s", release, program);
    execl(path, path, outcome, connection, (char *)NULL);
    fail("the Python shim cannot be executed");
}

/* Make stdin a file in memory, which can be read again. Return its length. */
static size_t keep_stdin(void)
{
    int file = memfd_create("netconf", MFD_CLOEXEC | NOEXEC_SEAL);
    if (file < 0)
        file = memfd_create("netconf", MFD_CLOEXEC); /* Linux before 6.3 */
    if (file <= 2) /* a standard stream is closed, or there are no files in memory */
        run_python(NULL, NULL);
    size_t length = 0;
    for (ssize_t more = 1; more > 0 && length <= STDIN_LIMIT; length += (size_t)more) {
        more = read(0, answer.body, LIMIT);
        if (more < 0 || write(file, answer.body, (size_t)more) != more)
            fail("stdin cannot be kept");
    }
    if (dup2(file, 0) != 0 || lseek(0, 0, SEEK_SET) != 0)
        fail("stdin cannot be kept");
    return length;
}

/* A zero ends each part. */
static bool append(const char *part)
{
    size_t length = strlen(part) + 1;
    if (length > LIMIT - HEADER - used)
        return false;
    memcpy(request.body + used, part, length);
    used += length;
    return true;
}

static bool append_release_and_namespace(void)
{
    char path[PATH_MAX + 32], version[65] = "", netns[65] = "";
    snprintf(path, sizeof path, "%s/VERSION", release);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return false;
    ssize_t length = read(file, version, sizeof version - 1);
    close(file);
    if (length < 2 || version[length - 1] != '\n')
        return false;
    version[length - 1] = 0;
    length = readlink("/proc/self/ns/net", netns, sizeof netns - 1);
    return length > 0 && append(version) && append(netns);
}

/* What a verb reads of the environment. If a name is there twice, the Python shim chooses. */
static bool append_variables(void)
{
    char own[64];
    for (char **each = environ; *each; each++) {
        const char *text = *each, *equals = strchr(text, '=');
        if (!equals || !strncmp(text, "HEADCNI_PROGRAM=", 16) ||
            (strncmp(text, "CNI_", 4) && strncmp(text, "HEADCNI_", 8) && strncmp(text, "PATH=", 5)))
            continue;
        for (char **earlier = environ; earlier < each; earlier++)
            if (!strncmp(*earlier, text, (size_t)(equals - text) + 1))
                return false;
        if (each - environ >= VARIABLES || !append(text))
            return false;
    }
    snprintf(own, sizeof own, "HEADCNI_PROGRAM=%s", program);
    return append(own) && append("");
}

/* Whether one of the paths means something only in our own working directory. */
static bool has_relative(const char *paths)
{
    for (; *paths; paths += strspn(paths, ":")) {
        if (*paths != '/')
            return true;
        paths += strcspn(paths, ":");
    }
    return false;
}

/* False if the call is not for the daemon, or does not fit. */
static bool compose_request(size_t netconf)
{
    if (!strcmp(variable("CNI_COMMAND", ""), "VERSION") ||
        has_relative(variable("CNI_PATH", "")) || has_relative(variable("CNI_NETNS", "")))
        return false;
    if (!append_release_and_namespace() || !append_variables() || netconf > LIMIT - HEADER - used ||
        pread(0, request.body + used, netconf, 0) != (ssize_t)netconf)
        return false;
    used += netconf;
    memcpy(request.magic, MAGIC, sizeof request.magic);
    request.length = htonl((uint32_t)used);
    return true;
}

/* A connection to a daemon that runs as the user that we run as; -1 if there is none. */
static int connect_to_daemon(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval limit = {.tv_sec = HAND_OVER_SECONDS};
    struct ucred peer = {0};
    socklen_t size = sizeof peer;
    const char *path = variable("HEADCNI_SOCKET", DAEMON);
    if (*path == 0 || strlen(path) >= sizeof address.sun_path)
        return -1;
    memcpy(address.sun_path, path, strlen(path));
    int server = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (server >= 0 && setsockopt(server, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) == 0 &&
        connect(server, (struct sockaddr *)&address, sizeof address) == 0 &&
        getsockopt(server, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid())
        return server;
    return -1;
}

/* With it goes the pod's network namespace, if it can be opened. */
static bool send_request(int server)
{
    int netns = open(variable("CNI_NETNS", ""), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof netns)];
    } passed = {.head = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    passed.head.cmsg_len = CMSG_LEN(sizeof netns);
    memcpy(CMSG_DATA(&passed.head), &netns, sizeof netns);
    struct iovec whole = {&request, HEADER + used};
    struct msghdr message = {.msg_iov = &whole, .msg_iovlen = 1, .msg_control = &passed};
    message.msg_controllen = netns < 0 ? 0 : sizeof passed;
    return sendmsg(server, &message, MSG_NOSIGNAL) == (ssize_t)whole.iov_len;
}

/* Returns only with all that was asked for. */
static void receive(int server, void *to, size_t length)
{
    for (size_t had = 0; had < length;) {
        ssize_t got = recv(server, (char *)to + had, length - had, 0);
        if (got < 0 && errno == EINTR)
            continue; /* no signal has a handler here, but we may be stopped and continued */
        if (got < 0 && errno == EAGAIN)
            run_python("silent", NULL); /* it may still be at work: nobody else may begin */
        if (got <= 0)
            run_python("refused", NULL);
        had += (size_t)got;
    }
}

int main(void)
{
    char *end, connection[16];
    long seconds = strtol(variable("HEADCNI_DAEMON_TIMEOUT", ANSWER_SECONDS), &end, 10);
    struct timeval limit = {.tv_sec = seconds};
    find_release();
    size_t netconf = keep_stdin();
    if (*end != 0 || seconds < 1 || seconds > 999999 || !compose_request(netconf))
        run_python(NULL, NULL);
    int server = connect_to_daemon();
    if (server < 0 || setsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) != 0 ||
        !send_request(server))
        run_python("refused", NULL);
    receive(server, &answer, HEADER);
    size_t length = ntohl(answer.length);
    if (memcmp(answer.magic, MAGIC, sizeof answer.magic) != 0 || length == 0 || length > LIMIT)
        run_python("refused", NULL);
    receive(server, answer.body, length);
    if (answer.body[0] == HANDED_BACK) {
        snprintf(connection, sizeof connection, "%d", dup(server)); /* stays open, as copies do */
        run_python("handed-back", connection);
    }
    signal(SIGPIPE, SIG_IGN);
    bool is_out = fwrite(answer.body + 1, 1, length - 1, stdout) == length - 1 && !fflush(stdout);
    _exit(is_out ? (unsigned char)answer.body[0] : 1);
}
