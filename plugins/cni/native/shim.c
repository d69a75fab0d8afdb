/* GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
 *
 * headcni/shim.py without an interpreter: what containerd starts for each call.
 *
 * It sends the call to the daemon and copies the answer. In every other case it executes the Python
 * shim of the same release with the same stdin, and makes no other decision. headcni/shim.py
 * describes the protocol; tests/native runs the same cases against both.
 *
 *     RELEASE/bin/headcni      this program, also as headcni-ipam and loopback
 *     RELEASE/python/headcni   the Python shim of the same name
 *     RELEASE/VERSION          what the daemon compares with its own
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

#define MAGIC "headcni\x01" /* the last byte is the protocol's version */

enum {
    MAGIC_LENGTH = sizeof MAGIC - 1,
    HEADER = MAGIC_LENGTH + 4,
    LIMIT = 1 << 20,        /* of either message */
    STDIN_LIMIT = 16 << 20, /* the Python shim refuses more */
    VARIABLES = 64,
    HAND_OVER_MS = 5 * 1000,
    ANSWER_MS = 120 * 1000,
    HANDED_BACK = 2,
};

static char request[LIMIT], answer[LIMIT];
static size_t used = HEADER;   /* of the request */
static size_t netconf;         /* where in the request stdin begins; 0 before it was read */
static char release[PATH_MAX]; /* such as /opt/headcni/releases/0.1.0 */
static const char *program;    /* headcni, headcni-ipam or loopback */

static const char *variable(const char *name)
{
    const char *value = getenv(name);
    return value ? value : "";
}

static bool write_all(int fd, const char *data, size_t length)
{
    while (length > 0) {
        ssize_t written = write(fd, data, length);
        if (written < 0 && errno != EINTR)
            return false;
        if (written > 0)
            data += written, length -= (size_t)written;
    }
    return true;
}

static _Noreturn void fail(const char *what)
{
    char text[PATH_MAX + 512];
    const char *form = "{\"cniVersion\": \"1.0.0\", \"code\": 5, \"msg\": \"native shim: %s\", "
                       "\"details\": \"%s; is the release in %s complete?\"}\n";
    int length = snprintf(text, sizeof text, form, what, strerror(errno), release);
    (void)!write_all(1, text, (size_t)length < sizeof text ? (size_t)length : 0);
    _exit(1);
}

static size_t read_stdin(char *to, size_t room)
{
    ssize_t got;
    do
        got = read(0, to, room);
    while (got < 0 && errno == EINTR);
    if (got < 0)
        fail("stdin cannot be read");
    return (size_t)got;
}

/* A stdin that begins with what was read, and goes on with what was not. */
static void restore_stdin(void)
{
    /* With vm.memfd_noexec=2 the kernel makes no others; before 6.3 it does not know the flag. */
    int copy = memfd_create("netconf", MFD_CLOEXEC | MFD_NOEXEC_SEAL);
    if (copy < 0 && errno == EINVAL)
        copy = memfd_create("netconf", MFD_CLOEXEC);
    bool kept = copy >= 0 && write_all(copy, request + netconf, used - netconf);
    for (size_t more = 1, all = used - netconf; kept && more > 0 && all <= STDIN_LIMIT; all += more) {
        more = read_stdin(answer, sizeof answer);
        kept = write_all(copy, answer, more);
    }
    if (!kept || lseek(copy, 0, SEEK_SET) != 0 || dup2(copy, 0) != 0)
        fail("stdin cannot be passed on");
}

/* `outcome` is what we learnt from the daemon: "refused", "silent", or "handed-back" with the
 * connection, which stays open. NULL leaves it to the Python shim to ask the daemon. */
static _Noreturn void run_python(const char *outcome, int server)
{
    char path[PATH_MAX + 32], fd[16];
    char *arguments[] = {path, (char *)outcome, server < 0 ? NULL : fd, NULL};
    if (netconf)
        restore_stdin();
    if (server >= 0 && fcntl(server, F_SETFD, 0) != 0)
        fail("the connection cannot be passed on");
    snprintf(path, sizeof path, "%s/python/%s", release, program);
    snprintf(fd, sizeof fd, "%d", server);
    execv(path, arguments);
    fail("the Python shim cannot be executed");
}

/* By our own file, not by argv[0]: links may have any name, and `current` may be switched. */
static void find_release(void)
{
    ssize_t length = readlink("/proc/self/exe", release, sizeof release - 1);
    char *end = length < 0 ? NULL : strstr(release, " (deleted)"); /* replaced meanwhile */
    if (end)
        *end = 0;
    char *slash = strrchr(release, '/');
    if (!slash || slash - release < 5 || memcmp(slash - 4, "/bin", 4) != 0)
        fail("it is not in the bin directory of a release");
    slash[-4] = 0;
    program = slash + 1;
}

/* Whether the Python shim would ask the daemon, too. */
static bool is_for_the_daemon(void)
{
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0)
            return false; /* a file of ours would take its place */
    if (strcmp(program, "headcni") && strcmp(program, "headcni-ipam") && strcmp(program, "loopback"))
        return false;
    const char *netns = variable("CNI_NETNS");
    if (!strcmp(variable("CNI_COMMAND"), "VERSION") || (*netns && *netns != '/'))
        return false;
    for (const char *path = variable("CNI_PATH"); *path; path += strcspn(path, ":")) {
        path += strspn(path, ":");
        if (*path && *path != '/')
            return false;
    }
    return true;
}

/* -1 if it is not a plain number: the Python shim knows what it means. */
static int answer_milliseconds(void)
{
    const char *text = getenv("HEADCNI_DAEMON_TIMEOUT");
    if (!text)
        return ANSWER_MS;
    size_t digits = strspn(text, "0123456789");
    if (digits == 0 || digits > 6 || text[digits] != 0)
        return -1;
    int seconds = atoi(text);
    return 1000 * (seconds > 1 ? seconds : 1);
}

static bool append(const char *text, ssize_t length)
{
    if (length < 0 || (size_t)length + 1 >= LIMIT - used)
        return false;
    memcpy(request + used, text, (size_t)length);
    used += (size_t)length;
    request[used++] = 0;
    return true;
}

static bool append_version(void)
{
    char path[PATH_MAX + 32], version[64];
    snprintf(path, sizeof path, "%s/VERSION", release);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, version, sizeof version);
    if (fd >= 0)
        close(fd);
    return length > 1 && version[length - 1] == '\n' && append(version, length - 1);
}

static bool append_netns(void)
{
    char name[64];
    return append(name, readlink("/proc/self/ns/net", name, sizeof name));
}

/* What a verb reads of the environment. If a name is there twice, the Python shim chooses. */
static bool append_variables(void)
{
    const char *seen[VARIABLES];
    int count = 0;
    for (char **each = environ; *each; each++) {
        const char *text = *each, *equals = strchr(text, '=');
        if (!equals || (strncmp(text, "CNI_", 4) && strncmp(text, "HEADCNI_", 8) &&
                        strncmp(text, "PATH=", 5)))
            continue;
        for (int earlier = 0; earlier < count; earlier++)
            if (!strncmp(seen[earlier], text, (size_t)(equals - text) + 1))
                return false;
        if (count == VARIABLES)
            return false;
        seen[count++] = text;
        if (strncmp(text, "HEADCNI_PROGRAM=", 16) && !append(text, (ssize_t)strlen(text)))
            return false;
    }
    char own[64];
    return append(own, snprintf(own, sizeof own, "HEADCNI_PROGRAM=%s", program)) && append("", 0);
}

/* False if stdin goes on after the end of the buffer. */
static bool append_netconf(void)
{
    netconf = used;
    for (size_t more = 1; more > 0; used += more) {
        if (used == LIMIT)
            return false;
        more = read_stdin(request + used, LIMIT - used);
    }
    return true;
}

static void put_header(void)
{
    size_t body = used - HEADER;
    memcpy(request, MAGIC, MAGIC_LENGTH);
    for (int byte = 0; byte < 4; byte++)
        request[MAGIC_LENGTH + byte] = (char)(body >> (24 - 8 * byte));
}

/* A connection to a daemon that runs as the user that we run as; -1 if there is none. */
static int connect_to_daemon(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct ucred peer = {0};
    socklen_t size = sizeof peer;
    const char *path = getenv("HEADCNI_SOCKET");
    path = path ? path : "/run/headcni/cni.sock";
    if (*path == 0 || strlen(path) >= sizeof address.sun_path)
        return -1;
    memcpy(address.sun_path, path, strlen(path));
    int server = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (server >= 0 && connect(server, (struct sockaddr *)&address, sizeof address) == 0 &&
        getsockopt(server, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid())
        return server;
    return -1;
}

static bool is_ready(int fd, short events, int milliseconds)
{
    struct pollfd one = {.fd = fd, .events = events};
    int ready;
    do
        ready = poll(&one, 1, milliseconds);
    while (ready < 0 && errno == EINTR);
    return ready > 0;
}

/* With its first bytes goes the pod's network namespace, if it can be opened. */
static bool send_request(int server)
{
    int netns = open(variable("CNI_NETNS"), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof netns)];
    } passed = {.head = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    struct iovec rest = {request, used};
    struct msghdr message = {.msg_iov = &rest, .msg_iovlen = 1};
    if (netns >= 0) {
        passed.head.cmsg_len = CMSG_LEN(sizeof netns);
        memcpy(CMSG_DATA(&passed.head), &netns, sizeof netns);
        message.msg_control = &passed;
        message.msg_controllen = sizeof passed;
    }
    while (rest.iov_len > 0) {
        ssize_t sent = sendmsg(server, &message, MSG_NOSIGNAL);
        if (sent < 0 && errno != EINTR &&
            (errno != EAGAIN || !is_ready(server, POLLOUT, HAND_OVER_MS)))
            return false;
        if (sent > 0) {
            rest.iov_base = (char *)rest.iov_base + sent;
            rest.iov_len -= (size_t)sent;
            message.msg_control = NULL;
            message.msg_controllen = 0;
        }
    }
    return true;
}

/* Returns only with all that was asked for. */
static void receive(int server, char *to, size_t length, int milliseconds)
{
    while (length > 0) {
        if (!is_ready(server, POLLIN, milliseconds))
            run_python("silent", -1); /* it may still be at work: nobody else may begin */
        ssize_t got = recv(server, to, length, 0);
        if (got == 0 || (got < 0 && errno != EINTR && errno != EAGAIN))
            run_python("refused", -1);
        if (got > 0)
            to += got, length -= (size_t)got;
    }
}

int main(void)
{
    unsigned char header[HEADER];
    find_release();
    int milliseconds = answer_milliseconds();
    if (milliseconds < 0 || !is_for_the_daemon() || !append_version() || !append_netns() ||
        !append_variables() || !append_netconf())
        run_python(NULL, -1);
    put_header();
    int server = connect_to_daemon();
    if (server < 0 || !send_request(server))
        run_python("refused", -1);
    receive(server, (char *)header, HEADER, milliseconds);
    const unsigned char *byte = header + MAGIC_LENGTH;
    size_t length = (size_t)byte[0] << 24 | (size_t)byte[1] << 16 | (size_t)byte[2] << 8 | byte[3];
    if (memcmp(header, MAGIC, MAGIC_LENGTH) != 0 || length == 0 || length > LIMIT)
        run_python("refused", -1);
    receive(server, answer, length, milliseconds);
    if (answer[0] == HANDED_BACK)
        run_python("handed-back", server);
    signal(SIGPIPE, SIG_IGN);
    _exit(write_all(1, answer + 1, length - 1) ? (unsigned char)answer[0] : 1);
}
