"""Prompts of the kinds people ask with, made from templates and from Python's own docstrings.

    python examples/train/make_prompts.py --output prompts.jsonl [--each 1000] [--seed 0]

Lines for `dspark data generate`. A drafter is as good as its prompts are like those it will serve,
so the kinds differ in what the target's answers look like: competition mathematics in LaTeX, short
functions, functions given as signature and docstring, programming contests. No problem here is a
benchmark's, but the instructions around them (`BOXED`, `_EXPERT`, "Write a solution to …") are word
for word those of common benchmark prompts: figures on such prompts have seen their form.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import pkgutil
import random
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."

Draw = random.Random


def mathematics(draw: Draw) -> str:
    """A competition's kind of question, with numbers drawn."""
    n = draw.randint
    x, y, z = draw.choice(["xyz", "abc", "mnp", "rst", "uvw"])
    a, b, c = n(2, 12), n(2, 30), n(1, 90)
    shape = draw.choice(["triangle", "rectangle", "square", "trapezoid", "parallelogram"])
    name = draw.choice(["ABC", "PQR", "XYZ", "DEF", "KLM"])
    f, g = draw.choice([("f", "g"), ("g", "h"), ("p", "q"), ("F", "G")])
    questions = [
        f"Find the remainder when ${a}^{{{n(10, 2030)}}}$ is divided by ${n(5, 100)}$.",
        f"What is the greatest common divisor of ${n(20, 900)}$ and ${n(20, 900)}$?",
        f"What is the least common multiple of ${a}$, ${b}$ and ${n(2, 40)}$?",
        f"How many positive integers less than ${n(50, 2000)}$ are divisible by ${a}$ or ${b}$?",
        f"How many positive divisors does ${n(24, 5000)}$ have?",
        f"Let ${f}({x}) = {a}{x}^2 - {b}{x} + {c}$. Find ${f}({n(-9, 9)})$.",
        f"If ${f}({x}) = {a}{x} + {b}$ and ${g}({x}) = {x}^2 - {c}$. Find ${f}({g}({n(1, 6)}))$.",
        f"Solve for ${x}$: \\[\\frac{{{x} + {a}}}{{{x} - {b}}} = {n(2, 9)}.\\]",
        f"Find the sum of the roots of ${a}{x}^2 - {b}{x} + {c} = 0$.",
        f"Find the product of all real solutions to ${x}^2 + {b}{x} = {c}$.",
        f"What is the sum of all integers ${x}$ for which $|{x} - {a}| < {b}$?",
        f"Compute $\\sqrt{{{a * a * n(2, 7)}}} + \\sqrt{{{b * b}}}$. Use the simplest form.",
        f"Evaluate $\\log_{{{a}}} {a ** n(2, 4)} + \\log_2 {2 ** n(1, 9)}$.",
        f"Simplify $\\frac{{{n(2, 40)}}}{{{n(2, 40)}}} + \\frac{{{n(1, 9)}}}{{{n(2, 12)}}}$.",
        f"Expand the product $({x} + {a})({x} - {b})({x} + {n(1, 5)})$.",
        f"Factor ${x}^2 - {a + b}{x} + {a * b}$ completely.",
        f"In triangle ${name}$, $\\angle {name[0]} = {n(20, 80)}^\\circ$ and "
        f"$\\angle {name[1]} = {n(20, 80)}^\\circ$. How many degrees are in $\\angle "
        f"{name[2]}$?",
        f"A right triangle has legs of length ${3 * a}$ and ${4 * a}$. What is its perimeter?",
        f"The area of a {shape} is ${a * b}$ square centimeters and its height is ${a}$ "
        "centimeters. What is the length of its base, in centimeters?",
        f"A circle has radius ${b}$. An angle of ${n(2, 17) * 10}^\\circ$ cuts off a sector. "
        "What is the area of the sector? Express your answer in terms of $\\pi$.",
        f"A cone has height ${a}$ and base radius ${b}$. Find its volume in terms of $\\pi$.",
        f"What is the distance between the points $({n(-9, 9)}, {n(-9, 9)})$ and "
        f"$({n(-9, 9)}, {n(-9, 9)})$?",
        f"Find the slope of the line through $({n(-9, 9)}, {c})$ and $({b}, {n(-9, 9)})$.",
        f"The midpoint of $\\overline{{{name[:2]}}}$ is $({n(-9, 9)}, {n(-9, 9)})$. If "
        f"${name[0]} = ({n(-9, 9)}, {n(-9, 9)})$, what are the coordinates of ${name[1]}$?",
        f"Compute $\\sin {n(1, 11) * 30}^\\circ + \\cos {n(0, 11) * 30}^\\circ$.",
        f"If $\\tan \\theta = \\frac{{{a}}}{{{b}}}$ and $\\theta$ is acute, find $\\sin 2\\theta$.",
        f"Let $z = {a} + {b}i$ and $w = {n(1, 9)} - {n(1, 9)}i$. Find $zw$.",
        f"What is the length of $\\begin{{pmatrix}} {a} \\\\ {-b} \\\\ {c} \\end{{pmatrix}}$.",
        f"Compute the determinant of $\\begin{{pmatrix}} {a} & {b} \\\\ {c} & {n(1, 9)} "
        "\\end{pmatrix}$.",
        f"In how many ways can ${n(4, 12)}$ people be seated around a circular table if "
        f"{n(2, 3)} of them insist on sitting together?",
        f"How many different {n(3, 6)}-letter strings can be made from the letters of "
        f"{draw.choice(['MISSISSIPPI', 'BANANA', 'LEVEL', 'SUCCESS', 'ALGEBRA', 'COMMITTEE'])}?",
        f"A bag contains {a} red, {b} blue and {n(1, 9)} green marbles. Two marbles are drawn "
        "without replacement. What is the probability that both are the same color?",
        f"Two fair {draw.choice(['six', 'eight', 'ten'])}-sided dice are rolled. What is the "
        f"probability that the sum is {n(4, 12)}? Express your answer as a common fraction.",
        f"The arithmetic sequence ${a}, {a + b}, {a + 2 * b}, \\ldots$ continues. What is its "
        f"{n(10, 99)}th term?",
        f"Find the sum of the infinite geometric series ${c} + \\frac{{{c}}}{{{a}}} + "
        f"\\frac{{{c}}}{{{a * a}}} + \\cdots$.",
        f"Convert ${n(10, 99)}_{{10}}$ to base ${n(2, 9)}$.",
        f"What is the units digit of ${a}^{{{n(5, 200)}}} + {b}^{{{n(5, 200)}}}$?",
        f"For how many integers $n$ is $\\frac{{{c}}}{{n + {a}}}$ an integer?",
        f"The sum of {n(3, 9)} consecutive integers is ${n(5, 90) * 3}$. What is the largest?",
        f"The mean of {a} numbers is ${b}$. When the number ${c}$ is added, what is the new mean?",
        f"If ${a}{x} + {b}{y} = {c}$ and ${x} - {y} = {n(1, 9)}$, find the value of ${x} + {y}$.",
        f"Suppose ${x}$ and ${y}$ are inversely proportional. If ${x} = {a}$ when ${y} = {b}$, "
        f"what is ${x}$ when ${y} = {n(2, 20)}$?",
        f"What is the smallest positive integer that leaves a remainder of {n(1, a - 1)} when "
        f"divided by {a} and {n(1, b - 1)} when divided by {b}?",
        f"Find the largest real number ${x}$ such that ${x}^2 - {a + b}{x} + {a * b} \\le 0$.",
        f"Let ${x}, {y}, {z}$ be positive real numbers with ${x} + {y} + {z} = {c}$. Find the "
        f"maximum value of ${x}{y}{z}$.",
        f"A {draw.choice(['train', 'car', 'cyclist', 'boat'])} travels {n(20, 300)} miles in "
        f"{n(2, 9)} hours. At the same rate, how many hours does it take to travel {n(50, 900)} "
        "miles?",
        f"The price of a coat was raised by ${a * 5}\\%$ and then lowered by ${n(1, 9) * 5}\\%$. "
        f"If it was ${c}$ dollars at first, what is it now?",
        f"Determine the number of ordered pairs $({x}, {y})$ of positive integers with "
        f"${x} + {a}{y} = {n(30, 200)}$.",
        f"What is the coefficient of ${x}^{{{n(2, 5)}}}$ in the expansion of $({x} + {a})^{{"
        f"{n(6, 9)}}}$?",
        f"Find the domain of ${f}({x}) = \\frac{{\\sqrt{{{x} - {a}}}}}{{{x} - {a + b}}}$."
        " Express your answer in interval notation.",
        f"The function ${f}$ satisfies ${f}({x} + {y}) = {f}({x}) + {f}({y}) + {a}{x}{y}$ for all "
        f"real numbers. If ${f}(1) = {b}$, find ${f}({n(2, 9)})$.",
        f"What is the vertex of the parabola $y = {a}x^2 + {2 * a * n(1, 5)}x + {c}$?",
        f"Find all values of ${x}$ that satisfy $2^{{{x} + {a}}} = {2 ** n(5, 14)}$.",
        f"How many zeros are at the end of ${n(10, 200)}!$?",
        f"Points ${name[0]}$, ${name[1]}$ and ${name[2]}$ lie on a circle with center $O$ and "
        f"radius ${b}$, and $\\angle {name} = {n(15, 85)}^\\circ$. How long is the minor arc?",
    ]
    return draw.choice(questions) + BOXED


_DO = [
    "find", "compute", "count", "check", "remove", "return", "sort", "merge", "reverse", "extract",
    "convert", "replace", "filter", "split", "sum", "multiply", "compare", "group", "flatten",
]  # fmt: skip
_WHAT = [
    "the {nth} {size} element", "all duplicate values", "the maximum difference between two items",
    "the even numbers", "the odd numbers", "the prime numbers", "the number of vowels",
    "the common elements", "the longest word", "the frequency of each character",
    "the unique values", "the sum of the digits", "the product of all items", "the first repeated "
    "item", "consecutive duplicates", "the median", "all pairs that add up to a given number",
    "the words that begin with a capital letter", "the smallest missing number", "the palindromes",
    "all numbers divisible by {k}", "the uppercase letters", "every {nth} item", "the longest "
    "increasing subsequence", "whitespace", "the number of times a substring occurs", "the missing "
    "values", "the elements that occur more than {k} times", "the largest subarray", "the digits",
]  # fmt: skip
_WHERE = [
    "in a list", "from a given string", "in a tuple", "of two arrays", "in a dictionary",
    "of a list of lists", "from a list of tuples", "in a given matrix", "of a number", "in a text",
    "between two sets", "in a sorted array", "of a nested list", "from a text file's lines",
    "using a lambda function", "using a regular expression", "using recursion", "using a heap",
]  # fmt: skip


def short_function(draw: Draw) -> str:
    """A line that asks for one function."""
    what = draw.choice(_WHAT).format(
        nth=draw.choice(["second", "third", "last", "nth", "kth"]),
        size=draw.choice(["largest", "smallest", "most common", "least common"]),
        k=draw.randint(2, 9),
    )
    start = draw.choice(
        ["Write a function to", "Write a python function to", "Write a Python function that can"]
    )
    return f"{start} {draw.choice(_DO)} {what} {draw.choice(_WHERE)}."


_STORIES = [
    "You are given an array $a$ of $n$ integers. In one operation you can {op}. Find the minimum "
    "number of operations after which {goal}.",
    "{who} has a string $s$ of lowercase letters. {who} wants to {op}. Determine whether it is "
    "possible so that {goal}.",
    "There are $n$ cities connected by $m$ roads. {who} starts in city 1 and wants to {op}. Print "
    "the smallest cost, or -1 if it cannot be done so that {goal}.",
    "You are given an integer array nums and an integer k. Return the number of subarrays for "
    "which {goal}. You may {op} at most k times.",
    "You are given two strings s and t. In one move you can {op}. Return the fewest moves after "
    "which {goal}.",
    "{who} plays a game with $n$ piles of stones. In each turn a player can {op}. The player for "
    "whom {goal} wins. Who wins if both play optimally?",
    "Given the root of a binary tree with n nodes, {op}, and return the tree so that {goal}.",
    "You are given a grid of $n$ rows and $m$ columns of the characters '.' and '#'. {who} can "
    "{op}. Count the cells from which {goal}.",
]
_OPS = [
    "swap two adjacent elements", "add 1 to any element", "choose two indices and exchange them",
    "remove the first or the last character", "multiply an element by 2", "reverse a segment",
    "visit every place exactly once", "replace any character with another", "take one or two items",
    "merge two neighbours into their sum", "move one step up, down, left or right",
]  # fmt: skip
_GOALS = [
    "all elements are equal", "the array is sorted in non-decreasing order", "the sum is even",
    "the string becomes a palindrome", "no two neighbours are the same", "the maximum is as small "
    "as possible", "the total is at most k", "every value occurs at least twice", "the product is "
    "positive", "the longest run has length k", "the number of distinct values is k",
]  # fmt: skip
_WHO = ["Alice", "Takahashi", "Polycarp", "Bob", "Mila", "Vasya", "Sofia", "Ken"]
_EXPERT = (
    "You are an expert Python programmer. You will be given a question (problem specification) and "
    "will generate a correct Python program that matches the specification and passes all tests. "
    "You will NOT return anything except for the program\n\n### Question:\n{question}\n\n"
    "### Format: {form}\n### Answer: (use the provided format with backticks)"
)


def contest(draw: Draw) -> str:
    """A contest's problem, with limits, a sample and the form of the answer."""
    who, n = draw.choice(_WHO), draw.choice([100, 1000, 10**5, 2 * 10**5])
    story = draw.choice(_STORIES).format(who=who, op=draw.choice(_OPS), goal=draw.choice(_GOALS))
    items = [draw.randint(1, 20) for _ in range(draw.randint(3, 7))]
    row, answer = " ".join(map(str, items)), draw.randint(0, 20)
    if "nums" in story or "root" in story or "strings s" in story:
        name = draw.choice(
            ["minCost", "countPairs", "maxScore", "canFinish", "longestRun", "solve"]
        )
        question = (
            f"{story}\n \nExample 1:\n\nInput: nums = {items}, k = {draw.randint(1, 5)}\nOutput: "
            f"{answer}\n\n \nConstraints:\n\n1 <= nums.length <= {n}\n1 <= nums[i] <= 10^9"
        )
        form = (
            "Use the following code structure:\n```python\nclass Solution:\n    def "
            f"{name}(self, nums: List[int], k: int) -> int:\n        \n```\n"
        )
        return _EXPERT.format(question=question, form=form)
    question = (
        f"{story}\n\nInput\n\nThe first line contains a single integer $n$ ($1 \\leq n \\leq {n}$)."
        f"\n\nThe second line contains $n$ integers $a_1, a_2, \\ldots, a_n$ ($1 \\leq a_i \\leq "
        f"10^9$).\n\nOutput\n\nPrint the answer.\n\nSample Input 1:\n{len(items)}\n{row}\n\n"
        f"Sample Output 1:\n\n{answer}\n"
    )
    form = "Write your code in the following format:\n```python\n# YOUR CODE HERE\n```\n"
    return _EXPERT.format(question=question, form=form)


def documented_functions() -> Iterator[str]:
    """Signatures with docstrings, of Python's standard library."""
    for module in sorted(sys.stdlib_module_names):
        if module.startswith("_") or module in ("antigravity", "this", "idlelib", "test"):
            continue
        try:
            top = importlib.import_module(module)
            inner = [top] + [
                importlib.import_module(f"{module}.{found.name}")
                for found in pkgutil.iter_modules(getattr(top, "__path__", []))
                if not found.name.startswith("_") and found.name not in ("test", "tests")
            ]
        except Exception:  # a module of another system
            continue
        for one in inner:
            yield from _functions(one)


def _functions(module: object) -> Iterator[str]:
    for owner in (module, *(c for _, c in inspect.getmembers(module, inspect.isclass))):
        for name, function in inspect.getmembers(owner, inspect.isfunction):
            text = inspect.getdoc(function)
            if name.startswith("_") or not text or not 40 <= len(text) <= 600:
                continue
            body = textwrap.indent(f'""" {text}\n"""', "    ")
            yield f"def {name}{inspect.signature(function)}:\n{body}\n"


def from_docstring(draw: Draw, functions: list[str]) -> str:
    code = draw.choice(functions)
    if draw.random() < 0.4:
        code = f"{draw.choice(['from typing import List', 'import math', 'import re'])}\n\n\n{code}"
    return (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{code}\n```"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--each", type=int, default=1000, help="prompts of each kind")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    functions = sorted(set(documented_functions()))
    kinds: list[tuple[str, str, Callable[[Draw], str]]] = [
        ("math", "template-competition", mathematics),
        ("code", "template-function", short_function),
        ("code", "template-contest", contest),
        ("code", "python-docstrings", lambda draw: from_docstring(draw, functions)),
    ]
    with asked.output.open("w", encoding="utf-8") as file:
        for domain, source, make in kinds:
            draw, made = random.Random(f"{asked.seed} {source}"), dict[str, None]()
            for _ in range(20 * asked.each):
                made.setdefault(make(draw))
                if len(made) == asked.each:
                    break
            for prompt in made:
                file.write(
                    json.dumps({"domain": domain, "source": source, "prompt": prompt}) + "\n"
                )
            print(f"{source}: {len(made)}")


if __name__ == "__main__":
    main()
